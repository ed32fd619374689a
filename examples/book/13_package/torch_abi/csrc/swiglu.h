#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace my_ops {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor>; // of gate and value

// Raises one sentence if the arguments do not fit. Every kernel calls it, so all say the same.
void check(const Tensor& gate, const Tensor& value);
void check(const Tensor& grad, const Tensor& gate, const Tensor& value);

// The operators in plain ATen.
Tensor swiglu_formula(const Tensor& gate, const Tensor& value);
Gradients swiglu_backward_formula(const Tensor& grad, const Tensor& gate, const Tensor& value);

} // namespace my_ops
