#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_composite.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_composite.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>

namespace lltm {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <typename Arguments>
bool any_requires_grad(const Arguments& arguments) {
  return at::GradMode::is_enabled() &&
      any_tensor(arguments, [](const Field<at::Tensor>& field) {
           return field.value.requires_grad();
         });
}

// torch::autograd::Function supports neither functorch's transforms nor
// forward-mode AD: it raises under both.
template <typename Arguments>
bool needs_composite(const Arguments& arguments) {
  return transform_is_active() ||
      any_tensor(arguments, [](const Field<at::Tensor>& field) {
           return field.value._fw_grad(/*level=*/0).defined();
         });
}

// The Autograd kernel of op. It calls composite where a
// torch::autograd::Function would not work, and otherwise differentiable where
// a gradient is required.
template <
    auto op,
    auto composite,
    auto differentiable = composite,
    typename Arguments = ArgumentsOf<op>>
auto autograd_kernel(const Arguments& arguments) {
  check_devices(arguments);
  if (needs_composite(arguments)) {
    return composite(arguments);
  }
  if (any_requires_grad(arguments)) {
    return differentiable(arguments);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op(arguments);
}

// Refuses a tensor that requires a gradient and has no derivative. Only the
// first tensors have one, as many as output_mask has entries.
template <typename Arguments>
void check_derivatives(const Arguments& arguments) {
  size_t tensors = 0;
  for_each_tensor(arguments, [&](const Field<at::Tensor>& field) {
    if (tensors++ < std::tuple_size_v<OutputMask> ||
        !field.value.requires_grad()) {
      return;
    }
    check_arguments(arguments);
    TORCH_CHECK(
        false,
        expected(
            arguments.kOperator,
            c10::str(field.name, " to require no gradient"),
            "one that does, and has no derivative"));
  });
}

// Calls Function::apply with the members of the struct as separate arguments:
// apply looks for tensors among its arguments, not inside of a struct. By the
// pointer before them forward hands out an output, which leads the handler
// below to the node.
template <typename Function, typename Arguments>
std::tuple<at::Tensor, at::Tensor> apply(const Arguments& arguments) {
  check_derivatives(arguments);
  at::Tensor output;
  try {
    const auto outputs = std::apply(
        [&](const auto&... fields) {
          return Function::apply(&output, fields.value...);
        },
        arguments.fields());
    return {outputs[0], outputs[1]};
  } catch (...) {
    // A hook on saved tensors may raise: activation checkpointing ends a
    // recomputation that way. ctx then still holds what it was to save, and
    // an output among it holds the node, which holds ctx.
    using Node = torch::autograd::CppNode<Function>;
    if (output.defined() && output.grad_fn()) {
      static_cast<Node&>(*output.grad_fn()).ctx_.save_for_backward({});
    }
    throw;
  }
}

OutputMask needed_gradients(const AutogradContext* ctx) {
  OutputMask needed{};
  for (size_t i = 0; i < needed.size(); ++i) {
    needed[i] = ctx->needs_input_grad(i);
  }
  return needed;
}

// The gradient of an output; nothing arrives for one that nobody used.
at::Tensor defined_or_zeros(const at::Tensor& grad, const at::Tensor& output) {
  return grad.defined() ? grad : at::zeros_like(output);
}

// What forward saved, in its order.
template <size_t kCount>
std::array<at::Tensor, kCount> saved_tensors(AutogradContext* ctx) {
  auto saved = ctx->get_saved_variables();
  TORCH_INTERNAL_ASSERT(saved.size() == kCount);
  std::array<at::Tensor, kCount> tensors;
  std::move(saved.begin(), saved.end(), tensors.begin());
  return tensors;
}

struct LLTMFunction : torch::autograd::Function<LLTMFunction> {
  static constexpr bool is_traceable = true;

  template <typename... Arguments>
  static variable_list forward(
      AutogradContext* ctx,
      at::Tensor* an_output,
      const Arguments&... arguments) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const ForwardArguments a{arguments...};
    auto [new_h, new_cell, gates] = _forward_with_gates(a);
    ctx->save_for_backward(
        {a.input, a.weights, a.bias, a.old_h, new_cell, gates});
    // Autograd's own zeros are plain tensors, which no DTensor goes with.
    ctx->set_materialize_grads(false);
    *an_output = new_cell;
    return {new_h, new_cell};
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grad_outputs) {
    const auto [input, weights, bias, old_h, new_cell, saved_gates] =
        saved_tensors<6>(ctx);
    // Grad mode is on under create_graph only. The saved gates are constants to
    // autograd: recompute them as functions of the inputs.
    const auto gates = at::GradMode::is_enabled()
        ? composite::gates(input, weights, bias, old_h)
        : saved_gates;
    auto [d_input, d_weights, d_bias, d_old_h, d_old_cell] = lltm::backward(
        {.grad_h = defined_or_zeros(grad_outputs[0], new_cell),
         .grad_cell = defined_or_zeros(grad_outputs[1], new_cell),
         .new_cell = new_cell,
         .gates = gates,
         .input = input,
         .weights = weights,
         .old_h = old_h,
         .output_mask = needed_gradients(ctx)});
    return {
        at::Tensor(), // for an_output
        d_input,
        d_weights,
        d_bias,
        d_old_h,
        d_old_cell};
  }
};

struct LLTMSequenceFunction : torch::autograd::Function<LLTMSequenceFunction> {
  static constexpr bool is_traceable = true;

  template <typename... Arguments>
  static variable_list forward(
      AutogradContext* ctx,
      at::Tensor* an_output,
      const Arguments&... arguments) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const SequenceForwardArguments a{arguments...};
    auto [output, cells, gates] = _sequence_forward_with_gates(a);
    ctx->save_for_backward(
        {a.input,
         a.weights,
         a.bias,
         a.h0,
         output,
         cells,
         gates,
         a.batch_sizes.value_or(at::Tensor()),
         a.resets.value_or(at::Tensor())});
    ctx->saved_data["reverse"] = a.reverse;
    ctx->set_materialize_grads(false);
    *an_output = output;
    return {output, cells};
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grad_outputs) {
    const auto
        [input,
         weights,
         bias,
         h0,
         output,
         cells,
         saved_gates,
         batch_sizes,
         resets] = saved_tensors<9>(ctx);
    const auto grad_output = defined_or_zeros(grad_outputs[0], output);
    const auto grad_cells = defined_or_zeros(grad_outputs[1], cells);
    const auto optional = [](const at::Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
    };
    auto gates = saved_gates;
    const SequenceBackwardArguments a{
        .grad_output = grad_output,
        .grad_cells = grad_cells,
        .output = output,
        .cells = cells,
        .gates = gates,
        .input = input,
        .weights = weights,
        .h0 = h0,
        .batch_sizes = optional(batch_sizes),
        .reverse = ctx->saved_data["reverse"].toBool(),
        .resets = optional(resets),
        .output_mask = needed_gradients(ctx)};
    if (at::GradMode::is_enabled()) {
      gates = composite::sequence_gates(a, bias);
    }
    auto [d_input, d_weights, d_bias, d_h0, d_c0] = sequence_backward(a);
    // None for an_output, and for the arguments after these.
    variable_list gradients{
        at::Tensor(), d_input, d_weights, d_bias, d_h0, d_c0};
    gradients.resize(1 + kNumberOf<SequenceForwardArguments>);
    return gradients;
  }
};

} // namespace

// Operators that give gates, and those that go backward, call composite
// formulas where a gradient is required. If backward did not, its results would
// silently be constants to whoever differentiates twice.
TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl(
      "forward",
      as_kernel<autograd_kernel<
          forward,
          composite::forward,
          apply<LLTMFunction, ForwardArguments>>>());
  m.impl(
      "_forward_with_gates",
      as_kernel<autograd_kernel<
          _forward_with_gates,
          composite::forward_with_gates>>());
  m.impl(
      "backward", as_kernel<autograd_kernel<backward, composite::backward>>());
  m.impl(
      "sequence_forward",
      as_kernel<autograd_kernel<
          sequence_forward,
          composite::sequence_forward,
          apply<LLTMSequenceFunction, SequenceForwardArguments>>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<autograd_kernel<
          _sequence_forward_with_gates,
          composite::sequence_forward_with_gates>>());
  m.impl(
      "sequence_backward",
      as_kernel<
          autograd_kernel<sequence_backward, composite::sequence_backward>>());
}

} // namespace lltm
