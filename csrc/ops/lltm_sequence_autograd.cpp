#include "ops/autograd_mode.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"
#include "ops/lltm_sequence_composite.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

// Does what lltm_autograd.cpp does for the cell. That file says why.
namespace lltm {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}

struct LLTMSequenceFunction : torch::autograd::Function<LLTMSequenceFunction> {
  static constexpr bool is_traceable = true;

  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      const at::Tensor& weights,
      const at::Tensor& bias,
      const at::Tensor& h0,
      const at::Tensor& c0,
      const OptionalTensor& batch_sizes,
      bool reverse,
      const OptionalTensor& resets) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [output, cells, gates] = _sequence_forward_with_gates(
        input, weights, bias, h0, c0, batch_sizes, reverse, resets);
    ctx->save_for_backward(
        {input,
         weights,
         bias,
         h0,
         output,
         cells,
         gates,
         batch_sizes.value_or(at::Tensor()),
         resets.value_or(at::Tensor())});
    ctx->set_materialize_grads(false);
    ctx->saved_data["reverse"] = reverse;
    return {output, cells};
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grad_outputs) {
    const auto saved = ctx->get_saved_variables();
    const auto& input = saved[0];
    const auto& weights = saved[1];
    const auto& bias = saved[2];
    const auto& h0 = saved[3];
    const auto& output = saved[4];
    const auto& cells = saved[5];
    const auto batch_sizes = optional(saved[7]);
    const auto resets = optional(saved[8]);
    const auto reverse = ctx->saved_data["reverse"].toBool();
    const auto gates = at::GradMode::is_enabled()
        ? composite::sequence_gates(
              output, input, weights, bias, h0, batch_sizes, reverse, resets)
        : saved[6];
    OutputMask output_mask{};
    for (size_t i = 0; i < output_mask.size(); ++i) {
      output_mask[i] = ctx->needs_input_grad(i);
    }
    auto [d_input, d_weights, d_bias, d_h0, d_c0] = sequence_backward(
        defined_or_zeros(grad_outputs[0], output),
        defined_or_zeros(grad_outputs[1], cells),
        output,
        cells,
        gates,
        input,
        weights,
        h0,
        batch_sizes,
        reverse,
        resets,
        output_mask);
    const at::Tensor none;
    return {d_input, d_weights, d_bias, d_h0, d_c0, none, none, none};
  }
};

ForwardResult sequence_forward_autograd(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets) {
  check_sequence_forward_devices(
      input, weights, bias, h0, c0, batch_sizes, resets);
  if (needs_composite(input, weights, bias, h0, c0)) {
    return composite::sequence_forward(
        input, weights, bias, h0, c0, batch_sizes, reverse, resets);
  }
  if (any_requires_grad(input, weights, bias, h0, c0)) {
    auto outputs = LLTMSequenceFunction::apply(
        input, weights, bias, h0, c0, batch_sizes, reverse, resets);
    return {outputs[0], outputs[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return sequence_forward(
      input, weights, bias, h0, c0, batch_sizes, reverse, resets);
}

ForwardWithGatesResult sequence_forward_with_gates_autograd(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets) {
  check_sequence_forward_devices(
      input, weights, bias, h0, c0, batch_sizes, resets);
  if (needs_composite(input, weights, bias, h0, c0) ||
      any_requires_grad(input, weights, bias, h0, c0)) {
    return composite::sequence_forward_with_gates(
        input, weights, bias, h0, c0, batch_sizes, reverse, resets);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return _sequence_forward_with_gates(
      input, weights, bias, h0, c0, batch_sizes, reverse, resets);
}

BackwardResult sequence_backward_autograd(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets,
    OutputMask output_mask) {
  check_sequence_backward_devices(
      grad_output,
      grad_cells,
      output,
      cells,
      gates,
      input,
      weights,
      h0,
      batch_sizes,
      resets);
  const bool composite =
      needs_composite(
          grad_output, grad_cells, output, cells, gates, input, weights, h0) ||
      any_requires_grad(
          grad_output, grad_cells, output, cells, gates, input, weights, h0);
  const auto call = [&](const auto& op) {
    return op(
        grad_output,
        grad_cells,
        output,
        cells,
        gates,
        input,
        weights,
        h0,
        batch_sizes,
        reverse,
        resets,
        output_mask);
  };
  if (composite) {
    return call(composite::sequence_backward);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call(sequence_backward);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl("sequence_forward", TORCH_FN(sequence_forward_autograd));
  m.impl(
      "_sequence_forward_with_gates",
      TORCH_FN(sequence_forward_with_gates_autograd));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_autograd));
}

} // namespace lltm
