#pragma once

#include "ops/lltm_sequence.h"
#include "ops/sequence_steps.h"

// The sequence operators as loops over the composite formulas of the cell:
// plain, differentiable ATen, for the same uses.
namespace lltm::composite {

// The state that each step begins with, [rows, state_size], out of the states
// after all steps and the initial one.
at::Tensor old_states(
    const std::vector<SequenceStep>& steps,
    const at::Tensor& states,
    const at::Tensor& initial,
    bool reverse,
    const OptionalTensor& resets);

ForwardResult sequence_forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets);

ForwardWithGatesResult sequence_forward_with_gates(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets);

// The gates of all steps, not one after the other: output holds the states that
// they begin with.
at::Tensor sequence_gates(
    const at::Tensor& output,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets);

BackwardResult sequence_backward(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets,
    OutputMask output_mask);

} // namespace lltm::composite
