#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_composite.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_composite.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
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
// torch::autograd::Function would not work, and otherwise recorded where a
// gradient is required.
template <
    auto op,
    auto composite,
    auto recorded,
    typename Arguments = ArgumentsOf<op>>
auto autograd_kernel(const Arguments& arguments) {
  check_devices(arguments);
  if (needs_composite(arguments)) {
    return composite(arguments);
  }
  if (any_requires_grad(arguments)) {
    return recorded(arguments);
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

OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}

// The cell and sequences are differentiated alike. Each names here the
// operators that do it, what is saved, and the arguments that go backward:
// tensors are in their order, which is the gradients of h and cell state, then
// saved().

struct Cell {
  using Forward = ForwardArguments;
  using Backward = BackwardArguments;
  static constexpr auto forward = _forward_with_gates;
  static constexpr auto backward = lltm::backward;
  static constexpr auto composite_backward = composite::backward_with_gates;

  static variable_list saved(
      const Forward& a,
      const ForwardWithGatesResult& results) {
    const auto& [new_h, new_cell, gates] = results;
    // An optimizer may change weights that backward does not need.
    const bool needs_weights =
        a.input.requires_grad() || a.old_h.requires_grad();
    const auto weights = needs_weights ? a.weights : at::Tensor();
    return {new_cell, gates, a.input, weights, a.old_h};
  }

  static Backward arguments(
      AutogradContext* /*ctx*/,
      variable_list& tensors,
      OutputMask output_mask) {
    const auto& gates = tensors[3];
    const auto& input = tensors[4];
    auto& weights = tensors[5];
    const auto& old_h = tensors[6];
    if (!weights.defined()) { // only their shape is needed
      weights = gates.new_empty_strided_symint(
          {gates.sym_size(1), old_h.sym_size(1) + input.sym_size(1)}, {0, 0});
    }
    return {
        .grad_h = tensors[0],
        .grad_cell = tensors[1],
        .new_cell = tensors[2],
        .gates = gates,
        .input = input,
        .weights = weights,
        .old_h = old_h,
        .output_mask = output_mask};
  }
};

struct Sequence {
  using Forward = SequenceForwardArguments;
  using Backward = SequenceBackwardArguments;
  static constexpr auto forward = _sequence_forward_with_gates;
  static constexpr auto backward = sequence_backward;
  static constexpr auto composite_backward =
      composite::sequence_backward_with_gates;

  static variable_list saved(
      const Forward& a,
      const ForwardWithGatesResult& results) {
    const auto& [output, cells, gates] = results;
    return {
        output,
        cells,
        gates,
        a.input,
        a.weights,
        a.h0,
        a.batch_sizes.value_or(at::Tensor()),
        a.resets.value_or(at::Tensor())};
  }

  static Backward arguments(
      AutogradContext* ctx,
      variable_list& tensors,
      OutputMask output_mask) {
    return {
        .grad_output = tensors[0],
        .grad_cells = tensors[1],
        .output = tensors[2],
        .cells = tensors[3],
        .gates = tensors[4],
        .input = tensors[5],
        .weights = tensors[6],
        .h0 = tensors[7],
        .batch_sizes = optional(tensors[8]),
        .reverse = ctx->saved_data["reverse"].toBool(),
        .resets = optional(tensors[9]),
        .output_mask = output_mask};
  }
};

// reverse is the one argument that is a bool.
template <typename T>
void save_reverse(AutogradContext* ctx, const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    ctx->saved_data["reverse"] = value;
  }
}

// Goes forward, and gives the gates: backward reads them, so the gradient of a
// gradient comes through them.
template <typename Node, typename T>
struct ForwardFunction : torch::autograd::Function<Node> {
  using Op = T;
  static constexpr bool is_traceable = true;

  template <typename... Values>
  static variable_list forward(
      AutogradContext* ctx,
      at::Tensor* an_output,
      const Values&... values) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const typename Op::Forward arguments{values...};
    const auto results = Op::forward(arguments);
    ctx->save_for_backward(Op::saved(arguments, results));
    (save_reverse(ctx, values), ...);
    // Autograd's own zeros are plain tensors, which no DTensor goes with.
    ctx->set_materialize_grads(false);
    const auto& [h, cell, gates] = results;
    *an_output = cell;
    return {h, cell, gates};
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    // Nothing arrives for an output that nobody used.
    const auto or_zeros = [&](const at::Tensor& grad) {
      return grad.defined() ? grad : at::zeros_like(saved[0]);
    };
    variable_list tensors{or_zeros(grads[0]), or_zeros(grads[1])};
    tensors.insert(tensors.end(), saved.begin(), saved.end());
    OutputMask output_mask{};
    for (size_t i = 0; i < output_mask.size(); ++i) {
      output_mask[i] = ctx->needs_input_grad(i);
    }
    const auto arguments = Op::arguments(ctx, tensors, output_mask);
    auto [d_input, d_weights, d_bias, d_h, d_cell] = grads[2].defined()
        ? Op::composite_backward(arguments, grads[2])
        : Op::backward(arguments);
    // None for an_output, and for the arguments after these.
    variable_list gradients{
        at::Tensor(), d_input, d_weights, d_bias, d_h, d_cell};
    gradients.resize(1 + kNumberOf<typename Op::Forward>);
    return gradients;
  }
};

// Goes backward. Its own derivative is that of the composite formulas, which
// are computed for it only then.
template <typename Node, typename T>
struct BackwardFunction : torch::autograd::Function<Node> {
  using Op = T;

  template <typename... Values>
  static variable_list forward(AutogradContext* ctx, const Values&... values) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const typename Op::Backward arguments{values...};
    variable_list tensors;
    const auto save = [&](const auto& value) {
      using Value = std::decay_t<decltype(value)>;
      if constexpr (std::is_same_v<Value, at::Tensor>) {
        tensors.push_back(value);
      } else if constexpr (std::is_same_v<Value, OptionalTensor>) {
        tensors.push_back(value.value_or(at::Tensor()));
      }
    };
    (save(values), ...);
    ctx->save_for_backward(std::move(tensors));
    (save_reverse(ctx, values), ...);
    const auto& mask = arguments.output_mask;
    ctx->saved_data["output_mask"] =
        std::vector<bool>(mask.begin(), mask.end());
    ctx->set_materialize_grads(false);
    return defined(Op::backward(arguments));
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grads) {
    const bool create_graph = at::GradMode::is_enabled();
    const at::AutoGradMode enable_grad(true);
    auto tensors = ctx->get_saved_variables();
    variable_list inputs;
    std::vector<size_t> places;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].defined() && tensors[i].requires_grad()) {
        // A view: gates depend on weights, and what comes to the weights
        // through the gates is not asked for here.
        tensors[i] = tensors[i].view_as(tensors[i]);
        inputs.push_back(tensors[i]);
        places.push_back(i);
      }
    }
    OutputMask output_mask{};
    const auto asked = ctx->saved_data["output_mask"].toBoolList();
    std::copy(asked.begin(), asked.end(), output_mask.begin());
    const auto arguments = Op::arguments(ctx, tensors, output_mask);
    const auto results =
        defined(Op::composite_backward(arguments, at::Tensor()));
    variable_list outputs, grads_of_outputs;
    for (size_t i = 0; i < results.size(); ++i) {
      if (grads[i].defined() && results[i].requires_grad()) {
        outputs.push_back(results[i]);
        grads_of_outputs.push_back(grads[i]);
      }
    }
    variable_list gradients(kNumberOf<typename Op::Backward>);
    if (!outputs.empty()) {
      const auto found = torch::autograd::grad(
          outputs,
          inputs,
          grads_of_outputs,
          /*retain_graph=*/std::nullopt,
          create_graph,
          /*allow_unused=*/true);
      for (size_t i = 0; i < places.size(); ++i) {
        gradients[places[i]] = found[i];
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
struct LLTMFunction : ForwardFunction<LLTMFunction, Cell> {};
struct LLTMBackwardFunction : BackwardFunction<LLTMBackwardFunction, Cell> {};
struct LLTMSequenceFunction : ForwardFunction<LLTMSequenceFunction, Sequence> {
};
struct LLTMSequenceBackwardFunction
    : BackwardFunction<LLTMSequenceBackwardFunction, Sequence> {};

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

template <typename Function>
ForwardWithGatesResult record_forward_with_gates(
    const typename Function::Op::Forward& arguments) {
  check_derivatives(arguments);
  // forward hands it out, which leads the handler below to the node.
  at::Tensor output;
  try {
    const auto outputs = apply<Function>(arguments, &output);
    return {outputs[0], outputs[1], outputs[2]};
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

template <typename Function>
ForwardResult record_forward(const typename Function::Op::Forward& arguments) {
  auto [h, cell, gates] = record_forward_with_gates<Function>(arguments);
  return {std::move(h), std::move(cell)};
}

template <typename Function>
BackwardResult record_backward(
    const typename Function::Op::Backward& arguments) {
  const auto outputs = apply<Function>(arguments);
  auto output = outputs.begin();
  const auto& asked = arguments.output_mask;
  std::array<at::Tensor, std::tuple_size_v<OutputMask>> gradients;
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = asked[i] ? *output++ : at::Tensor();
  }
  return std::tuple_cat(gradients);
}

} // namespace

// Results of all operators have derivatives: without, they would silently be
// constants to whoever differentiates twice.
TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl(
      "forward",
      as_kernel<autograd_kernel<
          forward,
          composite::forward,
          record_forward<LLTMFunction>>>());
  m.impl(
      "_forward_with_gates",
      as_kernel<autograd_kernel<
          _forward_with_gates,
          composite::forward_with_gates,
          record_forward_with_gates<LLTMFunction>>>());
  m.impl(
      "backward",
      as_kernel<autograd_kernel<
          backward,
          composite::backward,
          record_backward<LLTMBackwardFunction>>>());
  m.impl(
      "sequence_forward",
      as_kernel<autograd_kernel<
          sequence_forward,
          composite::sequence_forward,
          record_forward<LLTMSequenceFunction>>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<autograd_kernel<
          _sequence_forward_with_gates,
          composite::sequence_forward_with_gates,
          record_forward_with_gates<LLTMSequenceFunction>>>());
  m.impl(
      "sequence_backward",
      as_kernel<autograd_kernel<
          sequence_backward,
          composite::sequence_backward,
          record_backward<LLTMSequenceBackwardFunction>>>());
}

} // namespace lltm
