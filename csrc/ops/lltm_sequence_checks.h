#pragma once

#include "ops/lltm_sequence.h"

// The argument checks of the sequence operators, as in lltm_checks.h. The
// values of batch_sizes are checked where they are read: sequence_steps.h.
namespace lltm {

constexpr auto kSequenceForward = "lltm::sequence_forward";
constexpr auto kSequenceBackward = "lltm::sequence_backward";

void check_sequence_forward_devices(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets);

void check_sequence_forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets);

void check_sequence_backward_devices(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets);

void check_sequence_backward(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets);

} // namespace lltm
