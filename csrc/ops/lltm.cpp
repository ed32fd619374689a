#include "ops/lltm.h"

#include "ops/dispatch.h"

#include <torch/library.h>

#include <vector>

namespace lltm {

ForwardResult forward(const ForwardArguments& arguments) {
  static const Operator<ForwardResult, ForwardArguments> op("lltm::forward");
  return op(arguments);
}

ForwardWithGatesResult _forward_with_gates(const ForwardArguments& arguments) {
  static const Operator<ForwardWithGatesResult, ForwardArguments> op(
      "lltm::_forward_with_gates");
  return op(arguments);
}

BackwardResult backward(const BackwardArguments& arguments) {
  static const Operator<BackwardResult, BackwardArguments> op("lltm::backward");
  return op(arguments);
}

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
      "backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, "
      "Tensor gates, Tensor input, Tensor weights, Tensor old_h, "
      "bool[5] output_mask=[True, True, True, True, True]) "
      "-> (Tensor d_input, Tensor d_weights, Tensor d_bias, Tensor d_old_h, "
      "Tensor d_old_cell)",
      tags);
}

} // namespace lltm
