#pragma once

#include "ops/arguments.h"

#include <tuple>
#include <utility>
#include <vector>

// The operators as C++ functions. Each call goes through the dispatcher, so
// autograd, autocast, tracing and the function transforms apply, on any device:
//
//   auto [new_h, new_cell] =
//       lltm::forward({input, weights, bias, old_h, old_cell});
//
// fields() has the shapes. Columns [0, state_size) of weights multiply old_h,
// and the rest input. The rows of weights and bias are chunked into input gate,
// output gate, candidate.
// All arguments share one device and one dtype out of float64, float32,
// bfloat16 and float16, with any strides. Violations raise c10::Error.
namespace lltm {

struct ForwardArguments {
  static constexpr auto kOperator = "lltm::forward";

  const at::Tensor& input;
  const at::Tensor& weights;
  const at::Tensor& bias;
  const at::Tensor& old_h;
  const at::Tensor& old_cell;

  auto fields() const {
    return std::make_tuple(
        Field{"input", input, rows_of(*this, Dim::kInputFeatures)},
        Field{"weights", weights, kShapeOfWeights},
        Field{"bias", bias, kShapeOfBias},
        Field{"old_h", old_h, kShapeOfState},
        Field{"old_cell", old_cell, kShapeOfState});
  }

  auto shapes_of_results() const {
    const auto state = rows_of(*this, Dim::kStateSize);
    return std::array{state, state, rows_of(*this, Dim::kGates)};
  }
};

struct BackwardArguments {
  static constexpr auto kOperator = "lltm::backward";

  const at::Tensor& grad_h;
  const at::Tensor& grad_cell;
  const at::Tensor& new_cell;
  const at::Tensor& gates;
  const at::Tensor& input;
  const at::Tensor& weights;
  const at::Tensor& old_h;
  OutputMask output_mask = kAllWanted;

  auto fields() const {
    return std::make_tuple(
        Field{"grad_h", grad_h, kShapeOfState},
        Field{"grad_cell", grad_cell, kShapeOfState},
        Field{"new_cell", new_cell, kShapeOfState},
        Field{"gates", gates, rows_of(*this, Dim::kGates)},
        Field{"input", input, rows_of(*this, Dim::kInputFeatures)},
        Field{"weights", weights, kShapeOfWeights},
        Field{"old_h", old_h, kShapeOfState},
        Field{"output_mask", output_mask});
  }

  auto shapes_of_results() const {
    return shapes_of_gradients(*this);
  }
};

using ForwardResult = std::tuple<at::Tensor, at::Tensor>;
using ForwardWithGatesResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using BackwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// All results but the last, the gates.
template <typename Results>
auto without_gates(Results results) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return std::make_tuple(std::move(std::get<i>(results))...);
  }(std::make_index_sequence<std::tuple_size_v<Results> - 1>());
}

// What backward reads of the results.
inline std::vector<at::Tensor> results_for_backward(
    const ForwardWithGatesResult& results) {
  return {std::get<1>(results), std::get<2>(results)};
}

// Out of a call of forward, these results, and the gradients of all results.
inline BackwardArguments backward_arguments(
    const ForwardArguments& forward,
    const std::vector<at::Tensor>& results,
    const std::vector<at::Tensor>& gradients,
    const OutputMask& output_mask) {
  return {
      .grad_h = gradients[0],
      .grad_cell = gradients[1],
      .new_cell = results[0],
      .gates = results[1],
      .input = forward.input,
      .weights = forward.weights,
      .old_h = forward.old_h,
      .output_mask = output_mask};
}

// Returns (new_h, new_cell), each [batch, state_size].
ForwardResult forward(const ForwardArguments& arguments);

// Internal, called by autograd: forward, and the activated gates
// [batch, 3 * state_size] that backward needs.
ForwardWithGatesResult _forward_with_gates(const ForwardArguments& arguments);

// Returns (d_input, d_weights, d_bias, d_old_h, d_old_cell); where output_mask
// is false the gradient is not computed and an undefined tensor stands.
BackwardResult backward(const BackwardArguments& arguments);

} // namespace lltm
