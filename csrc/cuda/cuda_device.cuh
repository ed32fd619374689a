#pragma once

#include "cuda/launch_pointwise.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/macros/Macros.h>

namespace lltm {

// Four blocks to an SM leave each thread 64 registers. Without a number ptxas
// takes fewer, and spills.
template <typename Body>
C10_LAUNCH_BOUNDS_2(kPointwiseThreads, 4)
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

// No test checks this Device: it is to be read.
struct CudaDevice {
  using Guard = c10::cuda::CUDAGuard;
  using Stream = cudaStream_t;

  static Stream stream() {
    return c10::cuda::getCurrentCUDAStream();
  }

  template <typename Body>
  static void launch(
      Grid grid,
      Stream stream,
      int64_t rows,
      int64_t columns,
      const Body& body) {
    pointwise_kernel_device<<<
        dim3(grid.columns, grid.rows),
        kPointwiseThreads,
        /*shared_bytes=*/0,
        stream>>>(rows, columns, body);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

} // namespace lltm
