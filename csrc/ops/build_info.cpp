#include <torch/library.h>
#include <torch/version.h>

#include <string>

// What was built, for bug reports: a line "key=value" each.
namespace lltm {

namespace {

std::string build_info() {
#ifdef LLTM_CUDA_VERSION
  const std::string cuda = LLTM_CUDA_VERSION;
  const std::string architectures = LLTM_CUDA_ARCHITECTURES;
#else
  const std::string cuda = "not built";
  const std::string architectures = "none";
#endif
#ifdef __clang__
  const std::string compiler = __VERSION__; // begins with its name
#else
  const std::string compiler = "gcc " __VERSION__;
#endif
  return "built_for_torch=" TORCH_VERSION "\ncompiler=" + compiler +
      "\ncuda=" + cuda + "\ncuda_architectures=" + architectures;
}

} // namespace

TORCH_LIBRARY_FRAGMENT(lltm, m) {
  m.def("_build_info() -> str", &build_info);
}

} // namespace lltm
