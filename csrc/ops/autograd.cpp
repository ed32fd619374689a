#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_composite.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/GradMode.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

namespace lltm {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Saves the arguments of an operator, each tensor at the index of its field,
// and then those results that backward reads.
template <typename Arguments>
void save(
    AutogradContext* ctx,
    const Arguments& arguments,
    const variable_list& results) {
  variable_list tensors;
  const auto save_value = [&](const auto& value) {
    using T = std::decay_t<decltype(value)>;
    auto& tensor = tensors.emplace_back();
    if constexpr (std::is_same_v<T, at::Tensor>) {
      tensor = value;
    } else if constexpr (std::is_same_v<T, OptionalTensor>) {
      tensor = value.value_or(at::Tensor());
    } else {
      ctx->saved_data[std::to_string(tensors.size())] = value;
    }
  };
  std::apply(
      [&](const auto&... fields) { (save_value(fields.value), ...); },
      arguments.fields());
  tensors.insert(tensors.end(), results.begin(), results.end());
  ctx->save_for_backward(std::move(tensors));
}

// The arguments that save() saved, out of these tensors.
template <typename Arguments>
Arguments saved_arguments(AutogradContext* ctx, const variable_list& tensors) {
  size_t index = 0;
  const auto next =
      [&]<typename T>(std::type_identity<Field<T>>) -> decltype(auto) {
    const auto& tensor = tensors[index++];
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return (tensor);
    } else if constexpr (std::is_same_v<T, OptionalTensor>) {
      return tensor.defined() ? T(tensor) : T();
    } else {
      return ctx->saved_data[std::to_string(index)].template to<T>();
    }
  };
  return [&]<typename... Fields>(std::type_identity<std::tuple<Fields...>>) {
    return Arguments{next(std::type_identity<Fields>())...};
  }(std::type_identity<FieldsOf<Arguments>>());
}

bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

bool requires_grad(const Field<at::Tensor>& field) {
  return at::GradMode::is_enabled() && field.value.requires_grad();
}

// The gradients that are wanted, of the composite formulas, by ATen. They can
// be differentiated again, and mapped by vmap.
template <typename Arguments>
BackwardResult composite_backward(
    const Arguments& arguments,
    const variable_list& gradients,
    const OutputMask& wanted) {
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode enable_grad(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  variable_list inputs;
  size_t i = 0;
  const auto results = call_with_mapped_tensors(
      arguments,
      [&](const Field<at::Tensor>& field) {
        const auto index = i++;
        if (index >= wanted.size() || !wanted[index]) {
          return field.value;
        }
        // A view: one argument may depend on another, and what comes to that
        // one through it is not asked for here.
        return inputs.emplace_back(field.value.view_as(field.value));
      },
      [](const Arguments& views) { return composite_forward(views); });
  variable_list outputs, grads_of_outputs;
  auto gradient = gradients.begin();
  const auto add = [&](const at::Tensor& result) {
    if (gradient->defined() && result.requires_grad()) {
      outputs.push_back(result);
      grads_of_outputs.push_back(*gradient);
    }
    ++gradient;
  };
  std::apply([&](const auto&... each) { (add(each), ...); }, results);
  const auto found = torch::autograd::grad(
      outputs,
      inputs,
      grads_of_outputs,
      /*retain_graph=*/std::nullopt,
      create_graph,
      /*allow_unused=*/true);
  BackwardResult all;
  auto next = found.begin();
  i = 0;
  const auto set = [&](at::Tensor& d_argument) {
    if (wanted[i++]) {
      d_argument = *next++;
    }
  };
  std::apply([&](auto&... each) { (set(each), ...); }, all);
  return all;
}

// A result that nobody used has no gradient. Backward of a sequence takes it as
// missing; that of the cell needs zeros, of the sizes of new_cell.
template <typename Arguments>
variable_list given_or_zeros(
    variable_list gradients,
    const variable_list& results) {
  if constexpr (std::is_same_v<Arguments, ForwardArguments>) {
    for (auto& gradient : gradients) {
      if (!gradient.defined()) {
        gradient = at::zeros_like(results[0]);
      }
    }
  }
  return gradients;
}

// Goes forward by op_with_gates, and keeps the gates for backward_op.
template <typename Node, auto op, auto op_with_gates, auto backward_op>
struct ForwardFunction : torch::autograd::Function<Node> {
  using Arguments = ArgumentsOf<op>;
  using Results = decltype(op(std::declval<const Arguments&>()));
  // backward() calls operators alone, so compiled autograd may trace it.
  static constexpr bool is_traceable = true;

  static Results record(const Arguments& arguments) {
    // forward() sets it, and the handler below finds the node by it.
    at::Tensor output;
    // The fields are arguments of their own, because apply() looks for tensors
    // among its arguments, not inside of a struct.
    const auto apply = [&](const auto&... fields) {
      return Node::apply(&output, fields.value...);
    };
    try {
      Results results;
      auto next = std::apply(apply, arguments.fields());
      auto tensor = next.begin();
      std::apply([&](auto&... each) { ((each = *tensor++), ...); }, results);
      return results;
    } catch (...) {
      // A hook on saved tensors may raise: activation checkpointing ends a
      // recomputation that way. ctx then still holds what it was to save, and
      // an output among it holds the node, which holds ctx.
      using CppNode = torch::autograd::CppNode<Node>;
      if (output.defined() && output.grad_fn()) {
        static_cast<CppNode&>(*output.grad_fn()).ctx_.save_for_backward({});
      }
      throw;
    }
  }

  template <typename... Values>
  static variable_list forward(
      AutogradContext* ctx,
      at::Tensor* an_output,
      const Values&... values) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Arguments arguments{values...};
    const auto results = op_with_gates(arguments);
    // Only the first tensors have a derivative, those of output_mask.
    size_t tensors = 0;
    for_each_tensor(arguments, [&](const Field<at::Tensor>& field) {
      TORCH_CHECK(
          tensors++ < std::tuple_size_v<OutputMask> ||
              !field.value.requires_grad(),
          expected(
              arguments.kOperator,
              field,
              "to require no gradient",
              "one that does, and has no derivative"));
    });
    save(ctx, arguments, results_for_backward(results));
    // Autograd's own zeros are plain tensors, which no DTensor goes with.
    ctx->set_materialize_grads(false);
    *an_output = std::get<0>(results);
    return std::apply(
        [](const auto&... tensors) { return variable_list{tensors...}; },
        without_gates(results));
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto arguments = saved_arguments<Arguments>(ctx, tensors);
    constexpr auto kFields = std::tuple_size_v<FieldsOf<Arguments>>;
    const variable_list results(tensors.begin() + kFields, tensors.end());
    OutputMask output_mask{};
    for (size_t i = 0; i < output_mask.size(); ++i) {
      output_mask[i] = ctx->needs_input_grad(i); // it counts tensors only
    }
    const bool by_formulas = at::GradMode::is_enabled() ||
        transform_is_active() ||
        std::any_of(grads.begin(), grads.end(), has_tangent);
    auto [d_input, d_weights, d_bias, d_h, d_cell] = by_formulas
        ? composite_backward(arguments, grads, output_mask)
        : backward_op(backward_arguments(
              arguments,
              results,
              given_or_zeros<Arguments>(grads, results),
              output_mask));
    // None for an_output, and for the arguments after these.
    variable_list gradients{
        at::Tensor(), d_input, d_weights, d_bias, d_h, d_cell};
    gradients.resize(1 + kFields);
    return gradients;
  }
};

// Anomaly mode and grad_fn show these names.
struct LLTMFunction
    : ForwardFunction<LLTMFunction, forward, _forward_with_gates, backward> {};
struct LLTMSequenceFunction : ForwardFunction<
                                  LLTMSequenceFunction,
                                  sequence_forward,
                                  _sequence_forward_with_gates,
                                  sequence_backward> {};

// Whether backward_op has a kernel on the device, or else it has composite
// formulas alone.
template <typename Arguments>
bool has_kernels(const Arguments& arguments) {
  const auto device = arguments.input.device();
  if (device.is_cpu()) {
    return true;
  }
  constexpr auto kName = std::is_same_v<Arguments, ForwardArguments>
      ? "lltm::backward"
      : "lltm::sequence_backward";
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(kName, "")
      .hasKernelForDispatchKey(
          c10::computeDispatchKey(std::nullopt, std::nullopt, device));
}

// Function records op where a gradient is required.
template <auto op, typename Function, typename Arguments = ArgumentsOf<op>>
auto autograd_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_devices(arguments);
  const bool needs_gradient = any_tensor(arguments, requires_grad);
  // torch::autograd::Function raises under functorch's transforms and under
  // forward-mode AD.
  if (transform_is_active() ||
      any_tensor(
          arguments,
          [](const Field<at::Tensor>& field) {
            return has_tangent(field.value);
          }) ||
      (needs_gradient && !has_kernels(arguments))) {
    return composite_kernel<op>(arguments);
  }
  if (needs_gradient) {
    return Function::record(arguments);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op(arguments); // through the dispatcher again, below autograd
}

} // namespace

// The last four have no derivative. What they return raises where it is
// differentiated; without a kernel here it would silently be a constant.
TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl("forward", as_kernel<autograd_kernel<forward, LLTMFunction>>());
  m.impl(
      "sequence_forward",
      as_kernel<autograd_kernel<sequence_forward, LLTMSequenceFunction>>());
  for (const auto* name :
       {"_forward_with_gates",
        "backward",
        "_sequence_forward_with_gates",
        "sequence_backward"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

} // namespace lltm
