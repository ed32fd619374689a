#include "cuda/launch_pointwise.cuh"
#include "cuda/lltm_pointwise.h"
#include "ops/lltm.h"
#include "ops/lltm_checks.h"
#include "ops/lltm_linear.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace lltm {

namespace {

// Tensors are contiguous.
template <bool write_gates>
void launch_forward(
    const at::Tensor& gates,
    const at::Tensor& old_cell,
    const at::Tensor& new_h,
    const at::Tensor& new_cell) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "lltm_forward_cuda", [&] {
        launch_pointwise(
            new_h.size(0),
            new_h.size(1),
            ForwardUnit<scalar_t, write_gates>{
                new_h.size(1),
                gates.mutable_data_ptr<scalar_t>(),
                old_cell.const_data_ptr<scalar_t>(),
                new_h.mutable_data_ptr<scalar_t>(),
                new_cell.mutable_data_ptr<scalar_t>()});
      });
}

// d_gates may be undefined.
void launch_backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& d_gates,
    const at::Tensor& d_cell) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "lltm_backward_cuda", [&] {
        launch_pointwise(
            new_cell.size(0),
            new_cell.size(1),
            BackwardUnit<scalar_t>{
                new_cell.size(1),
                grad_h.const_data_ptr<scalar_t>(),
                grad_cell.const_data_ptr<scalar_t>(),
                new_cell.const_data_ptr<scalar_t>(),
                gates.const_data_ptr<scalar_t>(),
                d_gates.defined() ? d_gates.mutable_data_ptr<scalar_t>()
                                  : nullptr,
                d_cell.mutable_data_ptr<scalar_t>()});
      });
}

template <bool write_gates>
ForwardWithGatesResult forward_kernel_impl(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward(input, weights, bias, old_h, old_cell);
  const c10::cuda::CUDAGuard device_guard(input.device());
  const auto batch = input.size(0);
  const auto state_size = old_h.size(1);
  auto gates = linear_gates(input, weights, bias, old_h);
  auto new_h = at::empty({batch, state_size}, input.options());
  auto new_cell = at::empty({batch, state_size}, input.options());
  launch_forward<write_gates>(
      gates, *old_cell.expect_contiguous(), new_h, new_cell);
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

ForwardResult forward_kernel(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  auto [new_h, new_cell, gates] =
      forward_kernel_impl<false>(input, weights, bias, old_h, old_cell);
  return {std::move(new_h), std::move(new_cell)};
}

BackwardResult backward_kernel(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  const c10::cuda::CUDAGuard device_guard(input.device());
  const auto batch = input.size(0);
  const auto state_size = old_h.size(1);
  at::Tensor d_gates;
  if (needs_d_gates(output_mask)) {
    d_gates = at::empty({batch, 3 * state_size}, input.options());
  }
  auto d_old_cell = at::empty({batch, state_size}, input.options());
  launch_backward(
      *grad_h.expect_contiguous(),
      *grad_cell.expect_contiguous(),
      *new_cell.expect_contiguous(),
      *gates.expect_contiguous(),
      d_gates,
      d_old_cell);
  return linear_gates_backward(
      d_gates, d_old_cell, input, weights, old_h, output_mask);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl("forward", TORCH_FN(forward_kernel));
  m.impl("_forward_with_gates", TORCH_FN(forward_kernel_impl<true>));
  m.impl("backward", TORCH_FN(backward_kernel));
}

} // namespace lltm
