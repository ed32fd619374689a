#pragma once

#include "cuda/lltm_pointwise.h"
#include "cuda/row_grid.h"

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/macros/Macros.h>

// Launches of the pointwise part of a step on the current stream, for
// contiguous tensors.
namespace lltm {

// Four blocks to an SM leave each thread 64 registers. Without a number ptxas
// takes fewer, and spills.
template <typename Body>
C10_LAUNCH_BOUNDS_2(kThreads, 4)
__global__
    void pointwise_kernel_device(int64_t rows, int64_t columns, Body body) {
  for_each_of_thread(
      {gridDim.x, gridDim.y},
      {blockIdx.x, blockIdx.y},
      threadIdx.x,
      rows,
      columns,
      body);
}

template <typename Body>
void launch_pointwise(int64_t rows, int64_t columns, const Body& body) {
  if (rows == 0 || columns == 0) {
    return;
  }
  const auto grid = grid_for(rows, columns);
  pointwise_kernel_device<<<
      dim3(grid.columns, grid.rows),
      kThreads,
      0,
      c10::cuda::getCurrentCUDAStream()>>>(rows, columns, body);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

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

// d_h only in a sequence; d_gates may be undefined.
template <bool in_sequence>
void launch_backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& d_h,
    const at::Tensor& d_gates,
    const at::Tensor& d_cell) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "lltm_backward_cuda", [&] {
        using Unit = BackwardUnit<scalar_t, in_sequence>;
        launch_pointwise(
            new_cell.size(0),
            new_cell.size(1),
            Unit{
                new_cell.size(1),
                grad_h.const_data_ptr<scalar_t>(),
                grad_cell.const_data_ptr<scalar_t>(),
                new_cell.const_data_ptr<scalar_t>(),
                gates.const_data_ptr<scalar_t>(),
                in_sequence ? d_h.const_data_ptr<scalar_t>() : nullptr,
                d_gates.defined() ? d_gates.mutable_data_ptr<scalar_t>()
                                  : nullptr,
                d_cell.mutable_data_ptr<typename Unit::d_cell_t>()});
      });
}

} // namespace lltm
