#include "cuda/lltm_pointwise.cuh"
#include "ops/gate_math.h"
#include "ops/lltm.h"
#include "ops/lltm_checks.h"
#include "ops/lltm_linear.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace lltm {

namespace {

// d_gates may be null: nobody needs it.
template <typename scalar_t>
C10_LAUNCH_BOUNDS_1(kThreads)
__global__ void backward_kernel_device(
    int64_t batch,
    int64_t state_size,
    const scalar_t* __restrict__ grad_h,
    const scalar_t* __restrict__ grad_cell,
    const scalar_t* __restrict__ new_cell,
    const scalar_t* __restrict__ gates,
    scalar_t* __restrict__ d_gates,
    scalar_t* __restrict__ d_old_cell) {
  using opmath_t = at::opmath_type<scalar_t>;
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = blockIdx.y; row < batch; row += gridDim.y) {
    for (int64_t i = first; i < state_size; i += stride) {
      const int64_t unit = row * state_size + i;
      const int64_t gate = row * 3 * state_size + i;
      const auto out = cell_backward<opmath_t>(
          grad_h[unit],
          grad_cell[unit],
          new_cell[unit],
          gates[gate],
          gates[gate + state_size],
          gates[gate + 2 * state_size]);
      d_old_cell[unit] = out.d_old_cell;
      if (d_gates != nullptr) {
        d_gates[gate] = out.d_input_gate;
        d_gates[gate + state_size] = out.d_output_gate;
        d_gates[gate + 2 * state_size] = out.d_candidate;
      }
    }
  }
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
  if (new_cell.numel() == 0) {
    return {std::move(new_h), std::move(new_cell), std::move(gates)};
  }
  const auto old_cell_ = old_cell.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "lltm_forward_cuda", [&] {
        forward_kernel_device<scalar_t, write_gates>
            <<<grid_for(batch, state_size),
               kThreads,
               0,
               c10::cuda::getCurrentCUDAStream()>>>(
                batch,
                state_size,
                gates.mutable_data_ptr<scalar_t>(),
                old_cell_->const_data_ptr<scalar_t>(),
                new_h.mutable_data_ptr<scalar_t>(),
                new_cell.mutable_data_ptr<scalar_t>());
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      });
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
  const auto grad_h_ = grad_h.expect_contiguous();
  const auto grad_cell_ = grad_cell.expect_contiguous();
  const auto new_cell_ = new_cell.expect_contiguous();
  const auto gates_ = gates.expect_contiguous();
  at::Tensor d_gates;
  if (needs_d_gates(output_mask)) {
    d_gates = at::empty({batch, 3 * state_size}, input.options());
  }
  auto d_old_cell = at::empty({batch, state_size}, input.options());
  if (d_old_cell.numel() > 0) {
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf,
        at::kBFloat16,
        input.scalar_type(),
        "lltm_backward_cuda",
        [&] {
          backward_kernel_device<scalar_t>
              <<<grid_for(batch, state_size),
                 kThreads,
                 0,
                 c10::cuda::getCurrentCUDAStream()>>>(
                  batch,
                  state_size,
                  grad_h_->const_data_ptr<scalar_t>(),
                  grad_cell_->const_data_ptr<scalar_t>(),
                  new_cell_->const_data_ptr<scalar_t>(),
                  gates_->const_data_ptr<scalar_t>(),
                  d_gates.defined() ? d_gates.mutable_data_ptr<scalar_t>()
                                    : nullptr,
                  d_old_cell.mutable_data_ptr<scalar_t>());
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
  }
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
