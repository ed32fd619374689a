#pragma once

namespace lltm {

enum class CPUCapability { kDefault, kAVX2, kAVX512 };

// The instructions that ATen uses, so ATEN_CPU_CAPABILITY=default|avx2|avx512
// in the environment selects them here, too.
CPUCapability cpu_capability();

} // namespace lltm
