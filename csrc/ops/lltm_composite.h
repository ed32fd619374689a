#pragma once

#include "ops/lltm.h"

#include <utility>

// The cell in plain, differentiable ATen. These are the kernels of every device
// that has none of its own. Autograd and vmap fall back to them where the fused
// kernels have no derivative or batching rule. For half types the dtype of all
// computation, opmath, is float32, and only results are rounded. Where autocast
// would round float32, opmath is float64.
namespace lltm::composite {

at::Tensor to_opmath(const at::Tensor& tensor);

// What forward_with_gates does, without checks; cell states are of opmath.
ForwardWithGatesResult step(const ForwardArguments& arguments);

ForwardResult forward(const ForwardArguments& arguments);

ForwardWithGatesResult forward_with_gates(const ForwardArguments& arguments);

// The gradients of the pre-activations [batch, 3 * state_size], and that of the
// old cell state, both of opmath. grad_gates, the gradient of the activated
// gates by themselves, may be undefined. Does not check.
std::pair<at::Tensor, at::Tensor> gate_gradients(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& grad_gates,
    const at::Tensor& new_cell,
    const at::Tensor& gates);

// The gradients of all three results of forward_with_gates. Does not check.
BackwardResult backward_with_gates(
    const BackwardArguments& arguments,
    const at::Tensor& grad_gates);

BackwardResult backward(const BackwardArguments& arguments);

} // namespace lltm::composite
