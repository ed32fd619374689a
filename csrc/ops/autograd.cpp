#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_composite.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <string>

namespace lltm {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Saves the arguments of an operator that goes backward, but for output_mask.
// Each tensor has the index of its field.
template <typename Arguments>
void save(AutogradContext* ctx, const Arguments& arguments) {
  variable_list tensors;
  const auto save_value = [&](const auto& value) {
    using T = std::decay_t<decltype(value)>;
    auto& tensor = tensors.emplace_back();
    if constexpr (std::is_same_v<T, at::Tensor>) {
      tensor = value;
    } else if constexpr (std::is_same_v<T, OptionalTensor>) {
      tensor = value.value_or(at::Tensor());
    } else if constexpr (!std::is_same_v<T, OutputMask>) {
      ctx->saved_data[std::to_string(tensors.size())] = value;
    }
  };
  std::apply(
      [&](const auto&... fields) { (save_value(fields.value), ...); },
      arguments.fields());
  ctx->save_for_backward(std::move(tensors));
}

// What save() saved, with these tensors in place of the saved ones.
template <typename Arguments>
Arguments saved_arguments(
    AutogradContext* ctx,
    const variable_list& tensors,
    const OutputMask& output_mask) {
  size_t index = 0;
  const auto next =
      [&]<typename T>(std::type_identity<Field<T>>) -> decltype(auto) {
    const auto& tensor = tensors[index++];
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return (tensor);
    } else if constexpr (std::is_same_v<T, OptionalTensor>) {
      return tensor.defined() ? T(tensor) : T();
    } else if constexpr (std::is_same_v<T, OutputMask>) {
      return (output_mask);
    } else {
      return ctx->saved_data[std::to_string(index)].template to<T>();
    }
  };
  return [&]<typename... Fields>(std::type_identity<std::tuple<Fields...>>) {
    return Arguments{next(std::type_identity<Fields>())...};
  }(std::type_identity<FieldsOf<Arguments>>());
}

// Calls Function::apply with first and the members of the struct as separate
// arguments: apply looks for tensors among its arguments, not inside of a
// struct.
template <typename Function, typename Arguments, typename... First>
variable_list apply(const Arguments& arguments, First... first) {
  return std::apply(
      [&](const auto&... fields) {
        return Function::apply(first..., fields.value...);
      },
      arguments.fields());
}

// The results that are wanted, in their places.
template <typename Results, typename Arguments>
Results as_results(const Arguments& arguments, const variable_list& wanted) {
  Results results;
  auto next = wanted.begin();
  for_each_result(arguments, results, [&](at::Tensor& result, auto&&) {
    result = *next++;
  });
  return results;
}

// Goes forward, and gives the gates: backward reads them, so the gradient of a
// gradient comes through them.
template <typename Node, auto op, auto backward_op>
struct ForwardFunction : torch::autograd::Function<Node> {
  using Arguments = ArgumentsOf<op>;
  using Results = decltype(op(std::declval<const Arguments&>()));
  static constexpr bool kIsSequence =
      !std::is_same_v<Arguments, ForwardArguments>;
  // backward() calls operators alone, so compiled autograd may trace it.
  static constexpr bool is_traceable = true;

  static Results record(const Arguments& arguments) {
    // forward() sets it, and the handler below finds the node by it.
    at::Tensor output;
    try {
      return as_results<Results>(arguments, apply<Node>(arguments, &output));
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
    const auto results = op(arguments);
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
    auto weights = arguments.weights;
    if constexpr (!kIsSequence) {
      // An optimizer may change weights of which backward needs only the shape.
      if (!arguments.input.requires_grad() &&
          !arguments.old_h.requires_grad()) {
        const auto& gates = std::get<2>(results);
        weights = gates.new_empty_strided_symint(weights.sym_sizes(), {0, 0});
      }
    }
    save(ctx, backward_arguments(arguments, results, weights, at::Tensor()));
    // Autograd's own zeros are plain tensors, which no DTensor goes with.
    ctx->set_materialize_grads(false);
    *an_output = std::get<0>(results);
    return std::apply(
        [](const auto&... tensors) { return variable_list{tensors...}; },
        results);
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grads) {
    auto tensors = ctx->get_saved_variables();
    const auto& grad_gates = grads.back();
    for (size_t i = 0; i + 1 < grads.size(); ++i) {
      // Nothing arrives for an output that nobody used. Sequences need nothing;
      // for the cell, the third tensor has the shape of it.
      tensors[i] = grads[i].defined() || kIsSequence
          ? grads[i]
          : at::zeros_like(tensors[2]);
    }
    OutputMask output_mask{};
    for (size_t i = 0; i < output_mask.size(); ++i) {
      output_mask[i] = ctx->needs_input_grad(i); // it counts tensors only
    }
    const auto arguments =
        saved_arguments<ArgumentsOf<backward_op>>(ctx, tensors, output_mask);
    auto [d_input, d_weights, d_bias, d_h, d_cell] = grad_gates.defined()
        ? composite_backward(arguments, grad_gates)
        : backward_op(arguments);
    // None for an_output, and for the arguments after these.
    variable_list gradients{
        at::Tensor(), d_input, d_weights, d_bias, d_h, d_cell};
    gradients.resize(1 + std::tuple_size_v<FieldsOf<Arguments>>);
    return gradients;
  }
};

// Goes backward. Its own derivative is that of the composite formulas, which
// are computed for it only then.
template <typename Node, auto op>
struct BackwardFunction : torch::autograd::Function<Node> {
  using Arguments = ArgumentsOf<op>;

  static BackwardResult record(const Arguments& arguments) {
    return as_results<BackwardResult>(arguments, apply<Node>(arguments));
  }

  template <typename... Values>
  static variable_list forward(AutogradContext* ctx, const Values&... values) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Arguments arguments{values...};
    save(ctx, arguments);
    ctx->saved_data["output_mask"] = arguments.output_mask;
    ctx->set_materialize_grads(false);
    return defined(op(arguments));
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grads) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode enable_grad(true);
    auto tensors = ctx->get_saved_variables();
    variable_list inputs;
    std::vector<size_t> indices;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].defined() && tensors[i].requires_grad()) {
        // A view: gates depend on weights, and what comes to the weights
        // through the gates is not asked for here.
        tensors[i] = tensors[i].view_as(tensors[i]);
        inputs.push_back(tensors[i]);
        indices.push_back(i);
      }
    }
    const auto output_mask = ctx->saved_data["output_mask"].to<OutputMask>();
    const auto results = defined(composite_backward(
        saved_arguments<Arguments>(ctx, tensors, output_mask), at::Tensor()));
    variable_list outputs, grads_of_outputs;
    for (size_t i = 0; i < results.size(); ++i) {
      if (grads[i].defined() && results[i].requires_grad()) {
        outputs.push_back(results[i]);
        grads_of_outputs.push_back(grads[i]);
      }
    }
    variable_list gradients(tensors.size());
    if (!outputs.empty()) {
      const auto found = torch::autograd::grad(
          outputs,
          inputs,
          grads_of_outputs,
          /*retain_graph=*/std::nullopt,
          create_graph,
          /*allow_unused=*/true);
      for (size_t i = 0; i < indices.size(); ++i) {
        gradients[indices[i]] = found[i];
      }
    }
    return gradients;
  }

  static variable_list defined(const BackwardResult& result) {
    variable_list tensors;
    std::apply(
        [&](const auto&... gradients) {
          ((gradients.defined() ? tensors.push_back(gradients) : void()), ...);
        },
        result);
    return tensors;
  }
};

// Anomaly mode and grad_fn show these names.
struct LLTMFunction
    : ForwardFunction<LLTMFunction, _forward_with_gates, backward> {};
struct LLTMBackwardFunction : BackwardFunction<LLTMBackwardFunction, backward> {
};
struct LLTMSequenceFunction : ForwardFunction<
                                  LLTMSequenceFunction,
                                  _sequence_forward_with_gates,
                                  sequence_backward> {};
struct LLTMSequenceBackwardFunction
    : BackwardFunction<LLTMSequenceBackwardFunction, sequence_backward> {};

// The Autograd kernel of op. Function records it where a gradient is required.
template <auto op, typename Function, typename Arguments = ArgumentsOf<op>>
auto autograd_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_devices(arguments);
  const auto has_tangent = [](const Field<at::Tensor>& field) {
    return field.value._fw_grad(/*level=*/0).defined();
  };
  const auto requires_grad = [](const Field<at::Tensor>& field) {
    return field.value.requires_grad();
  };
  // torch::autograd::Function raises under functorch's transforms and under
  // forward-mode AD.
  if (transform_is_active() || any_tensor(arguments, has_tangent)) {
    return composite_kernel<op>(arguments);
  }
  if (at::GradMode::is_enabled() && any_tensor(arguments, requires_grad)) {
    return results_of<op>(Function::record(arguments));
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op(arguments); // through the dispatcher again, below autograd
}

template <auto op, typename Function>
constexpr auto kernel() {
  return as_kernel<autograd_kernel<op, Function>>();
}

} // namespace

// All operators have an Autograd kernel. Without one, results would silently be
// constants in a second derivative.
TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl("forward", kernel<forward, LLTMFunction>());
  m.impl("_forward_with_gates", kernel<_forward_with_gates, LLTMFunction>());
  m.impl("backward", kernel<backward, LLTMBackwardFunction>());
  m.impl("sequence_forward", kernel<sequence_forward, LLTMSequenceFunction>());
  m.impl(
      "_sequence_forward_with_gates",
      kernel<_sequence_forward_with_gates, LLTMSequenceFunction>());
  m.impl(
      "sequence_backward",
      kernel<sequence_backward, LLTMSequenceBackwardFunction>());
}

} // namespace lltm
