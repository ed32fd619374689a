#pragma once

#include <ATen/core/Tensor.h>

namespace my_ops {

using at::Tensor;

// Raises one sentence if the arguments do not fit. Every kernel calls it, so all say the same.
void check(const Tensor& scores, const Tensor& mask);
void check(const Tensor& grad, const Tensor& scores, const Tensor& mask);

// The operators in plain ATen.
Tensor masked_softmax_formula(const Tensor& scores, const Tensor& mask);
Tensor masked_softmax_backward_formula(
    const Tensor& grad, const Tensor& scores, const Tensor& mask);

} // namespace my_ops
