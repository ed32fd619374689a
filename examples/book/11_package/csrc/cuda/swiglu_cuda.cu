#include "../kernel.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>

namespace my_ops {
namespace {
template <typename Body>
__global__ void loop(int64_t size, Body body) {
  const int64_t threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += threads) {
    body(i);
  }
}

struct ForEach {
  template <typename Body>
  void operator()(int64_t size, const Body& body) const {
    // CUDA refuses a launch of no blocks.
    const auto blocks = std::clamp<int64_t>((size + 255) / 256, 1, 65535);
    // On the current stream: on another one the arguments may not be computed yet.
    loop<<<blocks, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(size, body);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

} // namespace

TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("swiglu", swiglu_kernel<ForEach>);
  m.impl("swiglu_backward", swiglu_backward_kernel<ForEach>);
}

} // namespace my_ops
