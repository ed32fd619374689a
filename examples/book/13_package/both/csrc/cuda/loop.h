#pragma once

#include <algorithm>
#include <cstdint>

namespace my_ops {
namespace {
template <typename Body>
__global__ void loop_kernel(int64_t size, Body body) {
  const int64_t threads = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += threads) {
    body(i);
  }
}

// The stream is the current one: on another one the arguments may not be computed yet.
template <typename Body>
void loop(int64_t size, const Body& body, cudaStream_t stream) {
  // CUDA refuses a launch of no blocks.
  const auto blocks = std::clamp<int64_t>((size + 255) / 256, 1, 65535);
  loop_kernel<<<blocks, 256, 0, stream>>>(size, body);
}

} // namespace
} // namespace my_ops
