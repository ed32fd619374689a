#pragma once

#include <unistd.h>

#include <cstdint>

namespace lltm {

enum class CPUCapability { kDefault, kAVX2, kAVX512 };

// The instructions that ATen uses, so ATEN_CPU_CAPABILITY=default|avx2|avx512
// in the environment selects them here, too.
CPUCapability cpu_capability();

// Bytes of a vector register.
inline int64_t vector_bytes() {
  const auto capability = cpu_capability();
  return capability == CPUCapability::kAVX512 ? 64
      : capability == CPUCapability::kAVX2    ? 32
                                              : 16;
}

// The L2 cache of a core has so many bytes, or 1 MiB if the system does not
// say.
inline int64_t l2_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? bytes : 1 << 20;
#else
  return 1 << 20;
#endif
}

} // namespace lltm
