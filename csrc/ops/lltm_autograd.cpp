#include "ops/autograd_mode.h"
#include "ops/lltm.h"
#include "ops/lltm_checks.h"
#include "ops/lltm_composite.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace lltm {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct LLTMFunction : torch::autograd::Function<LLTMFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      const at::Tensor& weights,
      const at::Tensor& bias,
      const at::Tensor& old_h,
      const at::Tensor& old_cell) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [new_h, new_cell, gates] =
        _forward_with_gates(input, weights, bias, old_h, old_cell);
    ctx->save_for_backward({input, weights, bias, old_h, new_cell, gates});
    // Autograd's own zeros are plain tensors, which no DTensor goes with.
    ctx->set_materialize_grads(false);
    return {new_h, new_cell};
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto& input = saved[0];
    const auto& weights = saved[1];
    const auto& bias = saved[2];
    const auto& old_h = saved[3];
    const auto& new_cell = saved[4];
    // Grad mode is on under create_graph only. The saved gates are constants to
    // autograd: recompute them as functions of the inputs.
    const auto gates = at::GradMode::is_enabled()
        ? composite::gates(input, weights, bias, old_h)
        : saved[5];
    OutputMask output_mask{};
    for (size_t i = 0; i < output_mask.size(); ++i) {
      output_mask[i] = ctx->needs_input_grad(i);
    }
    auto [d_input, d_weights, d_bias, d_old_h, d_old_cell] = lltm::backward(
        defined_or_zeros(grad_outputs[0], new_cell),
        defined_or_zeros(grad_outputs[1], new_cell),
        new_cell,
        gates,
        input,
        weights,
        old_h,
        output_mask);
    return {d_input, d_weights, d_bias, d_old_h, d_old_cell};
  }
};

ForwardResult forward_autograd(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward_devices(input, weights, bias, old_h, old_cell);
  if (needs_composite(input, weights, bias, old_h, old_cell)) {
    return composite::forward(input, weights, bias, old_h, old_cell);
  }
  if (any_requires_grad(input, weights, bias, old_h, old_cell)) {
    auto outputs = LLTMFunction::apply(input, weights, bias, old_h, old_cell);
    return {outputs[0], outputs[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return forward(input, weights, bias, old_h, old_cell);
}

ForwardWithGatesResult forward_with_gates_autograd(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward_devices(input, weights, bias, old_h, old_cell);
  if (needs_composite(input, weights, bias, old_h, old_cell) ||
      any_requires_grad(input, weights, bias, old_h, old_cell)) {
    return composite::forward_with_gates(input, weights, bias, old_h, old_cell);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return _forward_with_gates(input, weights, bias, old_h, old_cell);
}

// The second derivative: without this kernel, differentiating through backward
// would silently treat its results as constants.
BackwardResult backward_autograd(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  check_backward_devices(
      grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  if (needs_composite(
          grad_h, grad_cell, new_cell, gates, input, weights, old_h) ||
      any_requires_grad(
          grad_h, grad_cell, new_cell, gates, input, weights, old_h)) {
    return composite::backward(
        grad_h, grad_cell, new_cell, gates, input, weights, old_h, output_mask);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return backward(
      grad_h, grad_cell, new_cell, gates, input, weights, old_h, output_mask);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl("forward", TORCH_FN(forward_autograd));
  m.impl("_forward_with_gates", TORCH_FN(forward_with_gates_autograd));
  m.impl("backward", TORCH_FN(backward_autograd));
}

} // namespace lltm
