#pragma once

#include "ops/checks.h"
#include "ops/lltm.h"

#include <utility>

// The cell in plain, differentiable ATen: its linear part, for kernels that
// leave the products to ATen's GEMMs, and as a whole.
namespace lltm {

// The pre-activations [batch, 3 * state_size], [old_h, input] @ weights.T +
// bias, in a fresh contiguous tensor. Two GEMMs into one buffer: [old_h, input]
// is never materialised. Autocast is off inside, as in the next function:
// forward was cast before it got here, backward keeps its dtypes.
at::Tensor pre_activations(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h);

// The gradients that output_mask asks for. All but that of the cell state come
// from GEMMs with d_preactivations, the gradient of the pre-activations. They
// do not alias one another.
BackwardResult pre_activations_backward(
    const at::Tensor& d_preactivations,
    const at::Tensor& d_old_cell,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask);

// The composite formulas: the kernel of every device that has none of its own.
// ATen differentiates and maps them, where the fused kernels have no derivative
// or batching rule: in transforms, and for derivatives of higher order.

// For half types the dtype of all computation, opmath, is float32, and only
// results are rounded.
at::Tensor to_opmath(const at::Tensor& tensor);

// Forward without checks; new_cell is of opmath.
ForwardResult composite_step(const ForwardArguments& arguments);

// Forward without checks.
ForwardResult composite_forward(const ForwardArguments& arguments);

// The composite kernel of forward, or of sequence_forward by the function of
// lltm_sequence_composite.h.
template <auto op, typename Arguments = ArgumentsOf<op>>
auto composite_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_arguments(arguments);
  return composite_forward(arguments);
}

} // namespace lltm
