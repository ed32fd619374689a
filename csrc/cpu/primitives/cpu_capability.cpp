#include "cpu/primitives/cpu_capability.h"

#include <ATen/Version.h>

#include <string>

namespace lltm {

CPUCapability cpu_capability() {
  static const std::string name = at::get_cpu_capability();
  return name == "AVX512" ? CPUCapability::kAVX512
      : name == "AVX2"    ? CPUCapability::kAVX2
                          : CPUCapability::kDefault;
}

} // namespace lltm
