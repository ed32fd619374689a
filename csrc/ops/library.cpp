#include <torch/library.h>
#include <torch/version.h>

#include <string>
#include <vector>

namespace lltm {

namespace {

// What was built, for bug reports: a line "key=value" each.
std::string build_info() {
  return "built_for_torch=" TORCH_VERSION
#ifdef __clang__
         "\ncompiler=" __VERSION__ // begins with its name
#else
         "\ncompiler=gcc " __VERSION__
#endif
#ifdef LLTM_CUDA_VERSION
         "\ncuda=" LLTM_CUDA_VERSION
         "\ncuda_architectures=" LLTM_CUDA_ARCHITECTURES;
#else
         "\ncuda=not built\ncuda_architectures=none";
#endif
}

} // namespace

// Kernels are registered at the end of the files of ../cpu and ../cuda, and of
// the other .cpp files here: by dispatch key, or composite. Devices without
// kernels, and what these cannot do, take the composite formulas.
//
// flexible_layout: the kernels take any strides, so torch.compile need not copy
// an argument to give it the strides that it had in eager mode.
TORCH_LIBRARY(lltm, m) {
  const std::vector<at::Tag> tags{
      at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def(
      "forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, "
      "Tensor old_cell) -> (Tensor new_h, Tensor new_cell)",
      tags);
  m.def(
      "_forward_with_gates(Tensor input, Tensor weights, Tensor bias, "
      "Tensor old_h, Tensor old_cell) "
      "-> (Tensor new_h, Tensor new_cell, Tensor gates)",
      tags);
  m.def(
      "backward(Tensor? grad_h, Tensor? grad_cell, Tensor new_cell, "
      "Tensor gates, Tensor input, Tensor weights, Tensor old_h, "
      "bool[5] output_mask=[True, True, True, True, True]) "
      "-> (Tensor d_input, Tensor d_weights, Tensor d_bias, Tensor d_old_h, "
      "Tensor d_old_cell)",
      tags);
  m.def(
      "sequence_forward(Tensor input, Tensor weights, Tensor bias, Tensor h0, "
      "Tensor c0, Tensor? batch_sizes=None, bool reverse=False, "
      "Tensor? resets=None) "
      "-> (Tensor output, Tensor cells, Tensor h_n, Tensor c_n)",
      tags);
  m.def(
      "_sequence_forward_with_gates(Tensor input, Tensor weights, Tensor bias, "
      "Tensor h0, Tensor c0, Tensor? batch_sizes=None, bool reverse=False, "
      "Tensor? resets=None) "
      "-> (Tensor output, Tensor cells, Tensor h_n, Tensor c_n, Tensor gates)",
      tags);
  m.def(
      "sequence_backward(Tensor? grad_output, Tensor? grad_cells, "
      "Tensor? grad_h_n, Tensor? grad_c_n, Tensor output, Tensor cells, "
      "Tensor gates, Tensor input, Tensor weights, Tensor h0, "
      "Tensor? batch_sizes=None, bool reverse=False, Tensor? resets=None, "
      "bool[5] output_mask=[True, True, True, True, True]) "
      "-> (Tensor d_input, Tensor d_weights, Tensor d_bias, Tensor d_h0, "
      "Tensor d_c0)",
      tags);
  // Values are read by an operator so that tracers see it, and can refuse that
  // where batch_sizes are no constant of their graph. The message says for what
  // purpose the caller reads them.
  m.def(
      "_values_of_batch_sizes(Tensor batch_sizes, str caller, str purpose) "
      "-> int[]",
      {at::Tag::pt2_compliant_tag, at::Tag::data_dependent_output});
  m.def("_build_info() -> str", &build_info);
}

} // namespace lltm
