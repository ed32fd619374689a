#pragma once

#include "cuda/launch_pointwise.h"
#include "cuda/lltm_pointwise.h"
#include "ops/checks.h"
#include "ops/lltm.h"
#include "ops/lltm_composite.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

// The operators of the cell, but for what is CUDA's, which is the Device's. So
// tests run all of this on the host.
namespace lltm {

// Tensors are contiguous.
template <PointwiseDevice Device, bool write_gates>
void launch_forward(
    const at::Tensor& gates,
    const at::Tensor& old_cell,
    const at::Tensor& new_h,
    const at::Tensor& new_cell) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "lltm_forward_cuda", [&] {
        launch_pointwise<Device>(
            new_h.size(0),
            new_h.size(1),
            ForwardUnit<scalar_t, write_gates>{
                .state_size = new_h.size(1),
                .gates = gates.mutable_data_ptr<scalar_t>(),
                .old_cell = old_cell.const_data_ptr<scalar_t>(),
                .new_h = new_h.mutable_data_ptr<scalar_t>(),
                .new_cell = new_cell.mutable_data_ptr<scalar_t>()});
      });
}

// d_gates may be undefined.
template <PointwiseDevice Device>
void launch_backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& d_gates,
    const at::Tensor& d_cell) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "lltm_backward_cuda", [&] {
        launch_pointwise<Device>(
            new_cell.size(0),
            new_cell.size(1),
            BackwardUnit<scalar_t>{
                .state_size = new_cell.size(1),
                .grad_h = grad_h.const_data_ptr<scalar_t>(),
                .grad_cell = grad_cell.const_data_ptr<scalar_t>(),
                .new_cell = new_cell.const_data_ptr<scalar_t>(),
                .gates = gates.const_data_ptr<scalar_t>(),
                .d_gates = d_gates.defined()
                    ? d_gates.mutable_data_ptr<scalar_t>()
                    : nullptr,
                .d_cell = d_cell.mutable_data_ptr<scalar_t>()});
      });
}

template <PointwiseDevice Device, bool write_gates>
ForwardWithGatesResult forward_impl(const ForwardArguments& a) {
  check_arguments(a);
  const typename Device::Guard device_guard(a.input.device());
  const auto batch = a.input.size(0);
  const auto state_size = a.old_h.size(1);
  auto gates = pre_activations(a.input, a.weights, a.bias, a.old_h);
  auto new_h = at::empty({batch, state_size}, a.input.options());
  auto new_cell = at::empty({batch, state_size}, a.input.options());
  launch_forward<Device, write_gates>(
      gates, *a.old_cell.expect_contiguous(), new_h, new_cell);
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

template <PointwiseDevice Device>
BackwardResult backward_impl(const BackwardArguments& a) {
  check_arguments(a);
  const typename Device::Guard device_guard(a.input.device());
  const auto batch = a.input.size(0);
  const auto state_size = a.old_h.size(1);
  at::Tensor d_gates;
  // Only the gradient of the cell state does not need them.
  const auto [d_input, d_weights, d_bias, d_old_h, d_cell] = a.output_mask;
  if (d_input || d_weights || d_bias || d_old_h) {
    d_gates = at::empty({batch, 3 * state_size}, a.input.options());
  }
  auto d_old_cell = at::empty({batch, state_size}, a.input.options());
  launch_backward<Device>(
      *a.grad_h.expect_contiguous(),
      *a.grad_cell.expect_contiguous(),
      *a.new_cell.expect_contiguous(),
      *a.gates.expect_contiguous(),
      d_gates,
      d_old_cell);
  return pre_activations_backward(
      d_gates, d_old_cell, a.input, a.weights, a.old_h, a.output_mask);
}

} // namespace lltm
