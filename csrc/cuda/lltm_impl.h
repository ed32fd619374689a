#pragma once

#include "cuda/launch_pointwise.h"
#include "cuda/lltm_pointwise.h"
#include "ops/checks.h"
#include "ops/lltm.h"
#include "ops/lltm_composite.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

// The operators of the cell, but for what is CUDA's, which is the Device's. So
// tests run all of this on the host.
namespace lltm {

template <PointwiseDevice Device, bool write_gates>
ForwardWithGatesResult forward_impl(const ForwardArguments& a) {
  check_arguments(a);
  const typename Device::Guard device_guard(a.input.device());
  const auto batch = a.input.size(0);
  const auto state_size = a.old_h.size(1);
  auto gates = pre_activations(a.input, a.weights, a.bias, a.old_h);
  auto new_h = at::empty({batch, state_size}, a.input.options());
  auto new_cell = at::empty({batch, state_size}, a.input.options());
  const auto old_cell = a.old_cell.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "lltm_forward_cuda", [&] {
        launch_pointwise<Device>(
            batch,
            state_size,
            ForwardUnit<scalar_t, write_gates>{
                .math = CellMath<at::opmath_type<scalar_t>>(a),
                .state_size = state_size,
                .gates = gates.mutable_data_ptr<scalar_t>(),
                .old_cell = old_cell->const_data_ptr<scalar_t>(),
                .new_h = new_h.mutable_data_ptr<scalar_t>(),
                .new_cell = new_cell.mutable_data_ptr<scalar_t>()});
      });
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

template <PointwiseDevice Device>
BackwardResult backward_impl(const BackwardArguments& a) {
  check_arguments(a);
  const typename Device::Guard device_guard(a.input.device());
  const auto batch = a.input.size(0);
  const auto state_size = a.old_h.size(1);
  at::Tensor d_preactivations;
  // Only the gradient of the cell state does not need them.
  const auto [d_input, d_weights, d_bias, d_old_h, d_cell] = a.output_mask;
  if (d_input || d_weights || d_bias || d_old_h) {
    d_preactivations = at::empty({batch, 3 * state_size}, a.input.options());
  }
  auto d_old_cell = at::empty({batch, state_size}, a.input.options());
  const auto contiguous = [&](const OptionalTensor& gradient) {
    return (gradient ? *gradient : at::zeros_like(a.new_cell)).contiguous();
  };
  const at::Tensor grad_h = contiguous(a.grad_h);
  const at::Tensor grad_cell = contiguous(a.grad_cell);
  const auto new_cell = a.new_cell.expect_contiguous();
  const auto gates = a.gates.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.gates.scalar_type(),
      "lltm_backward_cuda",
      [&] {
        launch_pointwise<Device>(
            batch,
            state_size,
            BackwardUnit<scalar_t>{
                .math = CellMath<at::opmath_type<scalar_t>>(a),
                .state_size = state_size,
                .grad_h = grad_h.const_data_ptr<scalar_t>(),
                .grad_cell = grad_cell.const_data_ptr<scalar_t>(),
                .new_cell = new_cell->const_data_ptr<scalar_t>(),
                .gates = gates->const_data_ptr<scalar_t>(),
                .d_preactivations = d_preactivations.defined()
                    ? d_preactivations.mutable_data_ptr<scalar_t>()
                    : nullptr,
                .d_cell = d_old_cell.mutable_data_ptr<scalar_t>()});
      });
  return pre_activations_backward(
      d_preactivations, d_old_cell, a.input, a.weights, a.old_h, a.output_mask);
}

} // namespace lltm
