#pragma once

#include "ops/lltm.h"

// The cell over whole sequences, as C++ functions. As those of lltm.h, each
// call goes through the dispatcher.
//
// fields() has the shapes. batch_sizes are those of a PackedSequence, one for
// each step and never increasing; input is packed with them, and padded
// without. Output, cells and gates have a row for each row of input. h_n and
// c_n are the state after the last step that runs of each sequence.
//
// reverse runs from the last step to the first. Where resets are true, the step
// begins with zeros instead of the state before it, which may be the first.
namespace lltm {

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

  auto fields() const {
    return std::make_tuple(
        Field{"input", input, rows_of(*this, Dim::kInputFeatures)},
        Field{"weights", weights, kShapeOfWeights},
        Field{"bias", bias, kShapeOfBias},
        Field{"h0", h0, kShapeOfState},
        Field{"c0", c0, kShapeOfState},
        Field{"batch_sizes", batch_sizes, {Dim::kTime}, at::kLong, Place::kCPU},
        Field{"reverse", reverse},
        Field{"resets", resets, rows_of(*this, Dim::kNone), at::kBool});
  }

  auto shapes_of_results() const {
    const auto states = rows_of(*this, Dim::kStateSize);
    return std::array{
        states,
        states,
        kShapeOfState,
        kShapeOfState,
        rows_of(*this, Dim::kGates)};
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

  auto fields() const {
    return std::make_tuple(
        Field{"grad_output", grad_output, rows_of(*this, Dim::kStateSize)},
        Field{"grad_cells", grad_cells, rows_of(*this, Dim::kStateSize)},
        Field{"grad_h_n", grad_h_n, kShapeOfState},
        Field{"grad_c_n", grad_c_n, kShapeOfState},
        Field{"output", output, rows_of(*this, Dim::kStateSize)},
        Field{"cells", cells, rows_of(*this, Dim::kStateSize)},
        Field{"gates", gates, rows_of(*this, Dim::kGates)},
        Field{"input", input, rows_of(*this, Dim::kInputFeatures)},
        Field{"weights", weights, kShapeOfWeights},
        Field{"h0", h0, kShapeOfState},
        Field{"batch_sizes", batch_sizes, {Dim::kTime}, at::kLong, Place::kCPU},
        Field{"reverse", reverse},
        Field{"resets", resets, rows_of(*this, Dim::kNone), at::kBool},
        Field{"output_mask", output_mask});
  }

  auto shapes_of_results() const {
    return shapes_of_gradients(*this);
  }
};

using SequenceForwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using SequenceForwardWithGatesResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// These do what their namesakes in lltm.h do. An undefined gradient is missing.
inline std::vector<at::Tensor> results_for_backward(
    const SequenceForwardWithGatesResult& results) {
  return {std::get<0>(results), std::get<1>(results), std::get<4>(results)};
}

inline SequenceBackwardArguments backward_arguments(
    const SequenceForwardArguments& forward,
    const std::vector<at::Tensor>& results,
    const std::vector<at::Tensor>& gradients,
    const OutputMask& output_mask) {
  return {
      .grad_output = if_defined(gradients[0]),
      .grad_cells = if_defined(gradients[1]),
      .grad_h_n = if_defined(gradients[2]),
      .grad_c_n = if_defined(gradients[3]),
      .output = results[0],
      .cells = results[1],
      .gates = results[2],
      .input = forward.input,
      .weights = forward.weights,
      .h0 = forward.h0,
      .batch_sizes = forward.batch_sizes,
      .reverse = forward.reverse,
      .resets = forward.resets,
      .output_mask = output_mask};
}

// A step of the cell as a sequence.
inline SequenceBackwardArguments as_sequence(const BackwardArguments& a) {
  return {
      .grad_output = a.grad_h,
      .grad_cells = a.grad_cell,
      .grad_h_n = {},
      .grad_c_n = {},
      .output = a.new_cell, // no step reads the h of a step before it
      .cells = a.new_cell,
      .gates = a.gates,
      .input = a.input,
      .weights = a.weights,
      .h0 = a.old_h,
      .output_mask = a.output_mask};
}

// The struct of a step: these tensors, in the order of its members, and the
// numbers that it shares with its sequence.
template <typename Step, typename Sequence, typename... Tensors>
Step step_arguments(const Sequence& /*sequence*/, const Tensors&... tensors) {
  return {tensors...};
}

// Returns (output, cells, h_n, c_n): h and the cell state of all steps, then
// those after the last.
SequenceForwardResult sequence_forward(
    const SequenceForwardArguments& arguments);

// Internal, called by autograd: sequence_forward, and the activated gates of
// all steps.
SequenceForwardWithGatesResult _sequence_forward_with_gates(
    const SequenceForwardArguments& arguments);

// Returns the gradients of input, weights, bias, h0 and c0; where output_mask
// is false an undefined tensor stands.
BackwardResult sequence_backward(const SequenceBackwardArguments& arguments);

} // namespace lltm
