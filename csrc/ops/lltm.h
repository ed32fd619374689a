#pragma once

#include "ops/dispatch.h"

#include <tuple>
#include <utility>
#include <vector>

// The operators as C++ functions. Each call goes through the dispatcher, so
// autograd, autocast, tracing and the function transforms apply, on any device:
//
//   auto [new_h, new_cell] =
//       lltm::forward({input, weights, bias, old_h, old_cell});
//
// list() has the shapes. Columns [0, state_size) of weights multiply old_h,
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

  // The shape of input, or of what has a row for each row of it.
  static Shape row_shape(Dim last) {
    return {Dim::kBatch, last};
  }

  auto list() const {
    return std::make_tuple(
        Argument{"input", input, row_shape(Dim::kInputFeatures)},
        Argument{"weights", weights, kShapeOfWeights},
        Argument{"bias", bias, kShapeOfBias},
        Argument{"old_h", old_h, kShapeOfState},
        Argument{"old_cell", old_cell, kShapeOfState});
  }
};

// Gradients that are none are zeros.
struct BackwardArguments {
  static constexpr auto kOperator = "lltm::backward";

  OptionalTensor grad_h;
  OptionalTensor grad_cell;
  const at::Tensor& new_cell;
  const at::Tensor& gates;
  const at::Tensor& input;
  const at::Tensor& weights;
  const at::Tensor& old_h;
  OutputMask output_mask = kAllWanted;

  // The shape of input, or of what has a row for each row of it.
  static Shape row_shape(Dim last) {
    return {Dim::kBatch, last};
  }

  auto list() const {
    return std::make_tuple(
        Argument{"grad_h", grad_h, kShapeOfState},
        Argument{"grad_cell", grad_cell, kShapeOfState},
        Argument{"new_cell", new_cell, kShapeOfState},
        Argument{"gates", gates, row_shape(Dim::kGateUnits)},
        Argument{"input", input, row_shape(Dim::kInputFeatures)},
        Argument{"weights", weights, kShapeOfWeights},
        Argument{"old_h", old_h, kShapeOfState},
        Argument{"output_mask", output_mask});
  }
};

using ForwardResult = std::tuple<at::Tensor, at::Tensor>;
using ForwardWithGatesResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using BackwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Makes of a kernel with gates one without: its results but the last.
template <auto kernel, typename Arguments = ArgumentsOf<kernel>>
auto without_gates(const Arguments& arguments) {
  auto results = kernel(arguments);
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return std::make_tuple(std::move(std::get<i>(results))...);
  }(std::make_index_sequence<std::tuple_size_v<decltype(results)> - 1>());
}

// Returns (new_h, new_cell), each [batch, state_size].
inline ForwardResult forward(const ForwardArguments& arguments) {
  return call<forward>("lltm::forward", arguments);
}

// Internal, called by autograd: forward, and the activated gates
// [batch, 3 * state_size] that backward needs.
inline ForwardWithGatesResult _forward_with_gates(
    const ForwardArguments& arguments) {
  return call<_forward_with_gates>("lltm::_forward_with_gates", arguments);
}

// Returns (d_input, d_weights, d_bias, d_old_h, d_old_cell); where output_mask
// is false the gradient is not computed and an undefined tensor stands.
inline BackwardResult backward(const BackwardArguments& arguments) {
  return call<backward>("lltm::backward", arguments);
}

} // namespace lltm
