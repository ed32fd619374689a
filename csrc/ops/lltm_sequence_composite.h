#pragma once

#include "ops/lltm_composite.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

// The sequence operators as loops over the composite formulas of the cell:
// plain, differentiable ATen, for the same uses.
namespace lltm {

// The state that each step begins with, [rows, state_size], out of the states
// after all steps and the initial one.
at::Tensor old_states(
    const std::vector<SequenceStep>& steps,
    const at::Tensor& states,
    const at::Tensor& initial,
    bool reverse,
    const OptionalTensor& resets);

SequenceForwardWithGatesResult composite_forward(
    const SequenceForwardArguments& arguments);
BackwardResult composite_backward(
    const SequenceBackwardArguments& arguments,
    const at::Tensor& grad_gates);

} // namespace lltm
