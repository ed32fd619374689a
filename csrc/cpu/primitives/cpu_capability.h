#pragma once

#include <cstdint>

namespace lltm {

enum class CPUCapability { kDefault, kAVX2, kAVX512 };

// The instructions that ATen uses, so ATEN_CPU_CAPABILITY=default|avx2|avx512
// in the environment selects them here, too.
CPUCapability cpu_capability();

// The size of a register.
inline int64_t vector_bytes() {
  const auto capability = cpu_capability();
  return capability == CPUCapability::kAVX512 ? 64
      : capability == CPUCapability::kAVX2    ? 32
                                              : 16;
}

} // namespace lltm
