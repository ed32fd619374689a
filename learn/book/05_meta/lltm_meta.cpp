#include <torch/library.h>

#include "lltm.h"

namespace {

// Sizes are symbols while torch.compile traces: new_empty_symint keeps them so.
at::Tensor empty(const at::Tensor& like, c10::SymIntArrayRef sizes) {
  return like.new_empty_symint(sizes);
}

lltm::StateAndGates forward_with_gates_meta(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  lltm::log_call("Meta", "forward");
  lltm::check_forward(input, weights, bias, old_h, old_cell);
  auto sizes = old_h.sym_sizes();
  auto gates = empty(input, {old_h.sym_size(0), weights.sym_size(0)});
  return {empty(input, sizes), empty(input, sizes), gates};
}

lltm::State forward_meta(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto [new_h, new_cell, gates] = forward_with_gates_meta(input, weights, bias, old_h, old_cell);
  return {new_h, new_cell};
}

lltm::Gradients backward_meta(
    const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& old_h) {
  lltm::log_call("Meta", "backward");
  lltm::check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  return {
      empty(input, input.sym_sizes()), empty(input, weights.sym_sizes()),
      empty(input, {weights.sym_size(0)}), empty(input, old_h.sym_sizes()),
      empty(input, old_h.sym_sizes())};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("forward", forward_meta);
  m.impl("_forward_with_gates", forward_with_gates_meta);
  m.impl("backward", backward_meta);
}
