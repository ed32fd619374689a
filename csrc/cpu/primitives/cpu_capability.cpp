#include "cpu/primitives/cpu_capability.h"

#include <ATen/Version.h>

#include <string>

namespace lltm {

namespace {

CPUCapability ask_aten() {
  const std::string name = at::get_cpu_capability();
  return name == "AVX512" ? CPUCapability::kAVX512
      : name == "AVX2"    ? CPUCapability::kAVX2
                          : CPUCapability::kDefault;
}

} // namespace

CPUCapability cpu_capability() {
  static const auto capability = ask_aten();
  return capability;
}

} // namespace lltm
