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

#include <algorithm>

namespace lltm {

namespace {

constexpr int kThreads = 256;

// Rows of the batch along y, hidden units along x, in strides of the grid:
// grid.y ends at 65535, and no index needs a division.
dim3 grid_for(int64_t batch, int64_t state_size) {
  const auto blocks_x = (state_size + kThreads - 1) / kThreads;
  return dim3(
      static_cast<unsigned>(std::min<int64_t>(blocks_x, 65535)),
      static_cast<unsigned>(std::min<int64_t>(batch, 65535)));
}

// gates holds the pre-activations, and takes the activated gates if
// write_gates.
template <typename scalar_t, bool write_gates>
C10_LAUNCH_BOUNDS_1(kThreads)
__global__ void forward_kernel_device(
    int64_t batch,
    int64_t state_size,
    scalar_t* __restrict__ gates,
    const scalar_t* __restrict__ old_cell,
    scalar_t* __restrict__ new_h,
    scalar_t* __restrict__ new_cell) {
  using opmath_t = at::opmath_type<scalar_t>;
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = blockIdx.y; row < batch; row += gridDim.y) {
    scalar_t* const input_gate = gates + row * 3 * state_size;
    scalar_t* const output_gate = input_gate + state_size;
    scalar_t* const candidate = output_gate + state_size;
    for (int64_t i = first; i < state_size; i += stride) {
      const int64_t unit = row * state_size + i;
      const auto out = cell_forward<opmath_t>(
          input_gate[i], output_gate[i], candidate[i], old_cell[unit]);
      new_h[unit] = out.new_h;
      new_cell[unit] = out.new_cell;
      if constexpr (write_gates) {
        input_gate[i] = out.input_gate;
        output_gate[i] = out.output_gate;
        candidate[i] = out.candidate;
      }
    }
  }
}

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
