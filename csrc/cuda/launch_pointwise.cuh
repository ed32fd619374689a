#pragma once

#include "cuda/row_grid.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/macros/Macros.h>

namespace lltm {

// Four blocks to an SM leave each thread 64 registers. Without this bound ptxas
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

} // namespace lltm
