#pragma once

#include "ops/lltm_composite.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

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

// The gradients of all three results of sequence_forward with gates, without
// checks. grad_gates may be undefined.
BackwardResult sequence_backward_with_gates(
    const SequenceBackwardArguments& arguments,
    const at::Tensor& grad_gates);

} // namespace lltm::composite

namespace lltm {

template <>
ForwardResult composite_kernel<sequence_forward>(
    const SequenceForwardArguments& arguments);
template <>
ForwardWithGatesResult composite_kernel<_sequence_forward_with_gates>(
    const SequenceForwardArguments& arguments);
template <>
BackwardResult composite_kernel<sequence_backward>(
    const SequenceBackwardArguments& arguments);

} // namespace lltm
