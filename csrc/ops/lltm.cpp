#include "ops/lltm.h"

#include <torch/library.h>

namespace lltm {

ForwardResult forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::forward", "")
                             .typed<decltype(forward)>();
  return op.call(input, weights, bias, old_h, old_cell);
}

ForwardWithGatesResult _forward_with_gates(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::_forward_with_gates", "")
                             .typed<decltype(_forward_with_gates)>();
  return op.call(input, weights, bias, old_h, old_cell);
}

BackwardResult backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::backward", "")
                             .typed<decltype(backward)>();
  return op.call(
      grad_h, grad_cell, new_cell, gates, input, weights, old_h, output_mask);
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
