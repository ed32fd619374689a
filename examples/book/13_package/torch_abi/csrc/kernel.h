#pragma once

#include "element.h"
#include "swiglu.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

// What the kernels for CPU and CUDA share: all around the loop, their ForEach.
namespace my_ops {

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
