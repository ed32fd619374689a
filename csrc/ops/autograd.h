#pragma once

#include "ops/arguments.h"
#include "ops/checks.h"
#include "ops/dispatch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

// What the Autograd kernels of all operators are made of.
namespace lltm {

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
    auto differentiable,
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
// apply looks for tensors among its arguments, not inside of a struct. Before
// them stands a pointer, through which forward hands out one of its outputs.
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

inline OutputMask needed_gradients(
    const torch::autograd::AutogradContext* ctx) {
  OutputMask needed{};
  for (size_t i = 0; i < needed.size(); ++i) {
    needed[i] = ctx->needs_input_grad(i);
  }
  return needed;
}

// The gradient of an output; nothing arrives for one that nobody used.
inline at::Tensor defined_or_zeros(
    const at::Tensor& grad,
    const at::Tensor& output) {
  return grad.defined() ? grad : at::zeros_like(output);
}

} // namespace lltm
