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

OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}

template <typename Arguments, typename Predicate>
bool any_tensor(const Arguments& arguments, const Predicate& predicate) {
  bool any = false;
  for_each_tensor(arguments, [&](const Argument<at::Tensor>& argument) {
    any = any || predicate(argument.value);
  });
  return any;
}

template <typename... Tensors>
variable_list as_list(const std::tuple<Tensors...>& tensors) {
  return std::apply(
      [](const auto&... each) { return variable_list{each...}; }, tensors);
}

template <typename Tuple>
Tuple as_tuple(const variable_list& list) {
  Tuple tensors;
  auto next = list.begin();
  std::apply([&](auto&... each) { ((each = *next++), ...); }, tensors);
  return tensors;
}

// Saves the arguments of an operator, each tensor at its index, and then those
// results.
template <typename Arguments>
void save(
    AutogradContext* ctx,
    const Arguments& arguments,
    const variable_list& results) {
  variable_list tensors;
  const auto save_value = [&]<typename T>(const T& value) {
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
      [&](const auto&... each) { (save_value(each.value), ...); },
      arguments.list());
  tensors.insert(tensors.end(), results.begin(), results.end());
  ctx->save_for_backward(std::move(tensors));
}

// The arguments that save() saved, out of these tensors.
template <typename Arguments>
Arguments saved_arguments(AutogradContext* ctx, const variable_list& tensors) {
  size_t index = 0;
  const auto next =
      [&]<typename T>(std::type_identity<Argument<T>>) -> decltype(auto) {
    const auto& tensor = tensors[index++];
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return (tensor);
    } else if constexpr (std::is_same_v<T, OptionalTensor>) {
      return if_defined(tensor);
    } else {
      return ctx->saved_data[std::to_string(index)].template to<T>();
    }
  };
  return [&]<typename... Each>(std::type_identity<std::tuple<Each...>>) {
    return Arguments{next(std::type_identity<Each>())...};
  }(std::type_identity<ListOf<Arguments>>());
}

// These make backward's arguments from those of forward. results are those of
// forward with gates.
BackwardArguments backward_arguments(
    const ForwardArguments& forward,
    const variable_list& results,
    const variable_list& gradients,
    const OutputMask& output_mask) {
  return {
      .grad_h = if_defined(gradients[0]),
      .grad_cell = if_defined(gradients[1]),
      .new_cell = results[1],
      .gates = results[2],
      .input = forward.input,
      .weights = forward.weights,
      .old_h = forward.old_h,
      .output_mask = output_mask};
}

SequenceBackwardArguments backward_arguments(
    const SequenceForwardArguments& forward,
    const variable_list& results,
    const variable_list& gradients,
    const OutputMask& output_mask) {
  return {
      .grad_output = if_defined(gradients[0]),
      .grad_cells = if_defined(gradients[1]),
      .grad_h_n = if_defined(gradients[2]),
      .grad_c_n = if_defined(gradients[3]),
      .output = results[0],
      .cells = results[1],
      .gates = results[4],
      .input = forward.input,
      .weights = forward.weights,
      .h0 = forward.h0,
      .batch_sizes = forward.batch_sizes,
      .reverse = forward.reverse,
      .resets = forward.resets,
      .output_mask = output_mask};
}

bool has_tangent(const at::Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}

// The gradients that are wanted, of the composite formulas, by ATen. They can
// be differentiated again, and mapped by vmap.
template <typename Arguments>
variable_list composite_backward(
    const Arguments& arguments,
    const variable_list& gradients,
    const OutputMask& wanted) {
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode enable_grad(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  variable_list inputs;
  size_t index = 0;
  const auto results = as_list(call_with_replaced_tensors(
      arguments,
      [&](const Argument<at::Tensor>& argument) {
        const auto i = index++;
        // A view: one argument may depend on another, and what comes to that
        // one through it is not asked for here.
        return i < wanted.size() && wanted[i]
            ? inputs.emplace_back(argument.value.view_as(argument.value))
            : argument.value;
      },
      [](const Arguments& views) { return composite_forward(views); }));
  variable_list outputs, grads_of_outputs;
  for (size_t i = 0; i < results.size(); ++i) {
    if (gradients[i].defined() && results[i].requires_grad()) {
      outputs.push_back(results[i]);
      grads_of_outputs.push_back(gradients[i]);
    }
  }
  auto found = torch::autograd::grad(
      outputs,
      inputs,
      grads_of_outputs,
      /*retain_graph=*/std::nullopt,
      create_graph,
      /*allow_unused=*/true);
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!wanted[i]) {
      found.insert(found.begin() + static_cast<int64_t>(i), at::Tensor());
    }
  }
  return found;
}

// Goes forward by op_with_gates, and keeps the gates for backward_op.
template <typename Node, auto op, auto op_with_gates, auto backward_op>
struct ForwardFunction : torch::autograd::Function<Node> {
  using Arguments = ArgumentsOf<op>;
  // backward() calls operators alone, so compiled autograd may trace it.
  static constexpr bool is_traceable = true;

  // A device without them has the composite formulas of op alone.
  static bool has_kernels(c10::Device device) {
    constexpr auto kName = ArgumentsOf<backward_op>::kOperator;
    return device.is_cpu() ||
        c10::Dispatcher::singleton()
            .findSchemaOrThrow(kName, "")
            .hasKernelForDispatchKey(
                c10::computeDispatchKey(std::nullopt, std::nullopt, device));
  }

  static auto run_and_record(const Arguments& arguments) {
    // All of them, because apply() looks for tensors among its arguments, not
    // inside of a struct.
    return as_tuple<decltype(op(arguments))>(std::apply(
        [](const auto&... each) { return Node::apply(each.value...); },
        arguments.list()));
  }

  template <typename... Values>
  static variable_list forward(AutogradContext* ctx, const Values&... values) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Arguments arguments{values...};
    auto results = as_list(op_with_gates(arguments));
    const auto backward = backward_arguments(
        arguments, results, variable_list(results.size()), kAllWanted);
    variable_list saved;
    for (const auto& result : results) {
      const bool is_read = any_tensor(backward, [&](const at::Tensor& tensor) {
        return tensor.is_same(result);
      });
      // An alias with the same version. An output itself would hold the node,
      // which holds ctx, which goes on to hold it if a hook on saved tensors
      // raises: activation checkpointing ends a recomputation that way.
      saved.push_back(is_read ? result.tensor_data() : at::Tensor());
    }
    save(ctx, arguments, saved);
    // Autograd's own zeros are plain tensors, which no DTensor goes with.
    ctx->set_materialize_grads(false);
    results.pop_back(); // the gates
    return results;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto tensors = ctx->get_saved_variables();
    const auto arguments = saved_arguments<Arguments>(ctx, tensors);
    constexpr auto kArguments = std::tuple_size_v<ListOf<Arguments>>;
    const variable_list results(tensors.begin() + kArguments, tensors.end());
    OutputMask output_mask{};
    for (size_t i = 0; i < output_mask.size(); ++i) {
      output_mask[i] = ctx->needs_input_grad(i); // it counts tensors only
    }
    const bool by_formulas = at::GradMode::is_enabled() ||
        transform_is_active() ||
        std::any_of(grads.begin(), grads.end(), has_tangent);
    if (!by_formulas && !grads[0].defined()) {
      // DTensor of torch 2.11 takes the mesh from the first argument.
      grads[0] = at::zeros_like(results[1]);
    }
    auto gradients = by_formulas
        ? composite_backward(arguments, grads, output_mask)
        : as_list(backward_op(
              backward_arguments(arguments, results, grads, output_mask)));
    gradients.resize(kArguments); // the other arguments have none
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

// Function records op where a gradient is required.
template <auto op, typename Function, typename Arguments = ArgumentsOf<op>>
auto autograd_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_tensors(arguments);
  const bool needs_gradient = at::GradMode::is_enabled() &&
      any_tensor(arguments, [](const at::Tensor& tensor) {
                                return tensor.requires_grad();
                              });
  // torch::autograd::Function raises under functorch's transforms and under
  // forward-mode AD.
  if (transform_is_active() || any_tensor(arguments, has_tangent) ||
      (needs_gradient && !Function::has_kernels(arguments.input.device()))) {
    return composite_kernel<op>(arguments);
  }
  if (needs_gradient) {
    return Function::run_and_record(arguments);
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
