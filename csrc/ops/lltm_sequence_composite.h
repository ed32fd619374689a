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

ForwardResult sequence_forward_kernel(
    const SequenceForwardArguments& arguments);

ForwardWithGatesResult sequence_forward_with_gates_kernel(
    const SequenceForwardArguments& arguments);

// The gradients of all three results of sequence_forward with gates.
// grad_gates may be undefined. Does not check.
BackwardResult sequence_backward_with_gates(
    const SequenceBackwardArguments& arguments,
    const at::Tensor& grad_gates);

BackwardResult sequence_backward_kernel(
    const SequenceBackwardArguments& arguments);

} // namespace lltm::composite

namespace lltm {

template <>
inline constexpr auto composite_kernel<sequence_forward> =
    composite::sequence_forward_kernel;
template <>
inline constexpr auto composite_kernel<_sequence_forward_with_gates> =
    composite::sequence_forward_with_gates_kernel;
template <>
inline constexpr auto composite_kernel<sequence_backward> =
    composite::sequence_backward_kernel;

} // namespace lltm
