#pragma once

#include "ops/lltm.h"

// The linear part of the cell through ATen's GEMMs, for every device whose
// kernels have none of their own: [old_h, input] @ weights.T + bias. Autocast
// is off inside: forward was cast before it got here, backward keeps its
// dtypes.
namespace lltm {

// The pre-activations [batch, 3 * state_size], in a fresh contiguous tensor.
// Two GEMMs into one buffer: [old_h, input] is never materialised.
at::Tensor pre_activations(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h);

// Whether pre_activations_backward will need d_gates.
inline bool needs_d_gates(OutputMask output_mask) {
  return output_mask[0] || output_mask[1] || output_mask[2] || output_mask[3];
}

// The gradients that output_mask asks for, by GEMMs with d_gates, the gradient
// of the pre-activations. Products are in the dtype of d_gates: composite
// formulas give opmath, in which gradients that are too small for a half type
// add up. Results are in the dtype of input, and do not alias one another.
// Differentiable.
BackwardResult pre_activations_backward(
    const at::Tensor& d_gates,
    const at::Tensor& d_old_cell,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask);

} // namespace lltm
