#pragma once

#include "swiglu.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>

// What the kernels for CPU and CUDA share: one element, and all around the loop, their ForEach.
namespace my_ops {

template <typename scalar_t>
struct Forward {
  const scalar_t *gate, *value;
  scalar_t* result;

  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(int64_t i) const {
    const at::opmath_type<scalar_t> x = gate[i];
    result[i] = x / (1 + std::exp(-x)) * value[i];
  }
};

template <typename scalar_t>
struct Backward {
  const scalar_t *grad, *gate, *value;
  scalar_t *d_gate, *d_value;

  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(int64_t i) const {
    const at::opmath_type<scalar_t> x = gate[i];
    const auto s = 1 / (1 + std::exp(-x));
    const auto g = grad[i];
    d_gate[i] = s * (1 + x * (1 - s)) * value[i] * g;
    d_value[i] = x * s * g;
  }
};

template <typename ForEach>
Tensor swiglu_kernel(const Tensor& gate, const Tensor& value) {
  check(gate, value);
  const c10::DeviceGuard guard(gate.device());
  auto result = at::empty(gate.sizes(), gate.options());
  // A copy of what is not contiguous.
  const auto gate_ = gate.expect_contiguous(), value_ = value.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, gate.scalar_type(), "swiglu", [&] {
    const Forward<scalar_t> body{
        gate_->const_data_ptr<scalar_t>(), value_->const_data_ptr<scalar_t>(),
        result.mutable_data_ptr<scalar_t>()};
    ForEach()(gate.numel(), body);
  });
  return result;
}

template <typename ForEach>
Gradients swiglu_backward_kernel(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  check(grad, gate, value);
  const c10::DeviceGuard guard(gate.device());
  auto d_gate = at::empty(gate.sizes(), gate.options());
  auto d_value = at::empty(gate.sizes(), gate.options());
  const auto grad_ = grad.expect_contiguous(), gate_ = gate.expect_contiguous(),
             value_ = value.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, gate.scalar_type(), "swiglu", [&] {
    const Backward<scalar_t> body{
        grad_->const_data_ptr<scalar_t>(), gate_->const_data_ptr<scalar_t>(),
        value_->const_data_ptr<scalar_t>(), d_gate.mutable_data_ptr<scalar_t>(),
        d_value.mutable_data_ptr<scalar_t>()};
    ForEach()(gate.numel(), body);
  });
  return {std::move(d_gate), std::move(d_value)};
}

} // namespace my_ops
