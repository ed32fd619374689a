#pragma once

#include "ops/lltm.h"

// The cell over whole sequences, as C++ functions. As those of lltm.h, each
// call goes through the dispatcher.
//
// list() has the shapes. batch_sizes are those of a PackedSequence, one for
// each step and never increasing; input is packed with them, and padded
// without. Output, cells and gates have a row for each row of input. h_n and
// c_n are the state after the last step that runs of each sequence.
//
// reverse runs from the last step to the first. Where resets are true, the step
// begins with zeros instead of the state before it, which may be the first.
namespace lltm {

// The shape of input, or of what has a row for each row of it.
inline Shape row_shape(const OptionalTensor& batch_sizes, Dim last) {
  return batch_sizes ? Shape{Dim::kRows, last}
                     : Shape{Dim::kTime, Dim::kBatch, last};
}

struct SequenceForwardArguments {
  static constexpr auto kOperator = "lltm::sequence_forward";

  const at::Tensor& input;
  const at::Tensor& weights;
  const at::Tensor& bias;
  const at::Tensor& h0;
  const at::Tensor& c0;
  OptionalTensor batch_sizes{};
  bool reverse = false;
  OptionalTensor resets{};

  Shape row_shape(Dim last) const {
    return lltm::row_shape(batch_sizes, last);
  }

  auto list() const {
    return std::make_tuple(
        Argument{"input", input, row_shape(Dim::kInputFeatures)},
        Argument{"weights", weights, kShapeOfWeights},
        Argument{"bias", bias, kShapeOfBias},
        Argument{"h0", h0, kShapeOfState},
        Argument{"c0", c0, kShapeOfState},
        Argument{"batch_sizes", batch_sizes, {Dim::kTime}, at::kLong, true},
        Argument{"reverse", reverse},
        Argument{"resets", resets, row_shape(Dim::kNone), at::kBool});
  }
};

// Gradients that are none are zeros.
struct SequenceBackwardArguments {
  static constexpr auto kOperator = "lltm::sequence_backward";

  OptionalTensor grad_output;
  OptionalTensor grad_cells;
  OptionalTensor grad_h_n;
  OptionalTensor grad_c_n;
  const at::Tensor& output;
  const at::Tensor& cells;
  const at::Tensor& gates;
  const at::Tensor& input;
  const at::Tensor& weights;
  const at::Tensor& h0;
  OptionalTensor batch_sizes{};
  bool reverse = false;
  OptionalTensor resets{};
  OutputMask output_mask = kAllWanted;

  Shape row_shape(Dim last) const {
    return lltm::row_shape(batch_sizes, last);
  }

  auto list() const {
    return std::make_tuple(
        Argument{"grad_output", grad_output, row_shape(Dim::kStateSize)},
        Argument{"grad_cells", grad_cells, row_shape(Dim::kStateSize)},
        Argument{"grad_h_n", grad_h_n, kShapeOfState},
        Argument{"grad_c_n", grad_c_n, kShapeOfState},
        Argument{"output", output, row_shape(Dim::kStateSize)},
        Argument{"cells", cells, row_shape(Dim::kStateSize)},
        Argument{"gates", gates, row_shape(Dim::kGateUnits)},
        Argument{"input", input, row_shape(Dim::kInputFeatures)},
        Argument{"weights", weights, kShapeOfWeights},
        Argument{"h0", h0, kShapeOfState},
        Argument{"batch_sizes", batch_sizes, {Dim::kTime}, at::kLong, true},
        Argument{"reverse", reverse},
        Argument{"resets", resets, row_shape(Dim::kNone), at::kBool},
        Argument{"output_mask", output_mask});
  }
};

using SequenceForwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using SequenceForwardWithGatesResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Returns (output, cells, h_n, c_n): h and the cell state of all steps, then
// those after the last.
inline SequenceForwardResult sequence_forward(
    const SequenceForwardArguments& arguments) {
  return call<sequence_forward>("lltm::sequence_forward", arguments);
}

// Internal, called by autograd: sequence_forward, and the activated gates of
// all steps.
inline SequenceForwardWithGatesResult _sequence_forward_with_gates(
    const SequenceForwardArguments& arguments) {
  return call<_sequence_forward_with_gates>(
      "lltm::_sequence_forward_with_gates", arguments);
}

// Returns the gradients of input, weights, bias, h0 and c0; where output_mask
// is false an undefined tensor stands.
inline BackwardResult sequence_backward(
    const SequenceBackwardArguments& arguments) {
  return call<sequence_backward>("lltm::sequence_backward", arguments);
}

} // namespace lltm
