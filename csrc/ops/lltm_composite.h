#pragma once

#include "ops/checks.h"
#include "ops/lltm.h"

#include <type_traits>
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
// from GEMMs with d_gates, the gradient of the pre-activations. Products are in
// the dtype of d_gates: composite formulas give opmath, in which gradients that
// are too small for a half type add up. Results are in the dtype of input, and
// do not alias one another.
BackwardResult pre_activations_backward(
    const at::Tensor& d_gates,
    const at::Tensor& d_old_cell,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask);

// The composite formulas: the kernels of every device that has none of its own.
// Autograd and vmap fall back to them where the fused kernels have no
// derivative or batching rule.

// For half types the dtype of all computation, opmath, is float32, and only
// results are rounded.
at::Tensor to_opmath(const at::Tensor& tensor);

// Forward with gates, without checks; new_cell is of opmath.
ForwardWithGatesResult composite_step(const ForwardArguments& arguments);

// The gradients of the pre-activations [batch, 3 * state_size], and that of the
// old cell state, both of opmath. grad_gates, the gradient of the activated
// gates by themselves, may be undefined.
std::pair<at::Tensor, at::Tensor> composite_gate_gradients(
    const BackwardArguments& arguments,
    const at::Tensor& grad_gates);

// Forward with gates, and backward from the gradients of all three results,
// without checks. grad_gates may be undefined.
ForwardWithGatesResult composite_forward(const ForwardArguments& arguments);
BackwardResult composite_backward(
    const BackwardArguments& arguments,
    const at::Tensor& grad_gates);

// The composite kernel of an operator. By the type of its arguments it calls
// the functions above, or those for sequences of lltm_sequence_composite.h.
template <auto op, typename Arguments = ArgumentsOf<op>>
auto composite_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_arguments(arguments);
  if constexpr (requires { arguments.output_mask; }) {
    return composite_backward(arguments, at::Tensor());
  } else {
    return results_of<op>(composite_forward(arguments));
  }
}

} // namespace lltm
