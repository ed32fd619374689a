#pragma once

#include "ops/lltm.h"

#include <optional>

// The cell over whole sequences, as C++ functions. As those of lltm.h, each
// call goes through the dispatcher.
//
// Shapes: input [time, batch, input_features]; or, with batch_sizes, packed
// [sum(batch_sizes), input_features], where batch_sizes are as those of a
// PackedSequence: int64, on the CPU, one for each step, never increasing. h0
// and c0 [batch, state_size]; weights and bias as for the cell. Results, which
// have a row for each row of input, begin with its sizes.
//
// reverse runs from the last step to the first. resets, of the sizes of input
// but the last, are bool: where true, the step begins with zeros instead of the
// state of the step before it.
namespace lltm {

using OptionalTensor = std::optional<at::Tensor>;

// The type of sequence_forward and of its twin with gates.
template <typename Result>
using SequenceForwardOp = Result(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const OptionalTensor&,
    bool,
    const OptionalTensor&);

// Returns (output, cells): h and the cell state of all steps.
ForwardResult sequence_forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes = {},
    bool reverse = false,
    const OptionalTensor& resets = {});

// Internal, called by autograd: sequence_forward, and the activated gates of
// all steps.
ForwardWithGatesResult _sequence_forward_with_gates(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes = {},
    bool reverse = false,
    const OptionalTensor& resets = {});

// Returns the gradients of input, weights, bias, h0 and c0; where output_mask
// is false an undefined tensor stands.
BackwardResult sequence_backward(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes = {},
    bool reverse = false,
    const OptionalTensor& resets = {},
    OutputMask output_mask = {true, true, true, true, true});

} // namespace lltm
