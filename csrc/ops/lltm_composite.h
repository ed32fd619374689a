#pragma once

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

// The kernels of every device that has none of its own. Autograd and vmap fall
// back to them where the fused kernels have no derivative or batching rule. For
// half types the dtype of all computation, opmath, is float32, and only results
// are rounded.
namespace composite {

at::Tensor to_opmath(const at::Tensor& tensor);

// Forward with gates, without checks; new_cell is of opmath.
ForwardWithGatesResult step(const ForwardArguments& arguments);

// The gradients of the pre-activations [batch, 3 * state_size], and that of the
// old cell state, both of opmath. grad_gates, the gradient of the activated
// gates by themselves, may be undefined.
std::pair<at::Tensor, at::Tensor> gate_gradients(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& grad_gates,
    const at::Tensor& new_cell,
    const at::Tensor& gates);

// The gradients of all three results of forward with gates, without checks.
BackwardResult backward_with_gates(
    const BackwardArguments& arguments,
    const at::Tensor& grad_gates);

} // namespace composite

// The composite kernel of an operator.
template <auto op>
auto composite_kernel(const ArgumentsOf<op>& arguments)
    -> decltype(op(arguments));
template <>
ForwardResult composite_kernel<forward>(const ForwardArguments& arguments);
template <>
ForwardWithGatesResult composite_kernel<_forward_with_gates>(
    const ForwardArguments& arguments);
template <>
BackwardResult composite_kernel<backward>(const BackwardArguments& arguments);

} // namespace lltm
