#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "lltm_kernel.h"

namespace {

constexpr int kThreads = 256;
// More blocks than these would only wait for a place. Each thread takes as many units as need be.
constexpr int64_t kMostBlocks = 65535;

template <typename F>
__global__ void units_kernel(int64_t batch, int64_t state_size, F f) {
  // 64 bits before the product: 32 bits end at 2^31 units.
  auto first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  auto stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (auto k = first; k < batch * state_size; k += stride) {
    f(k / state_size, k % state_size);
  }
}

constexpr auto for_each_unit = [](int64_t batch, int64_t state_size, auto f) {
  auto units = batch * state_size;
  if (units == 0) {
    return; // to launch no block is an error
  }
  auto blocks = std::min<int64_t>((units + kThreads - 1) / kThreads, kMostBlocks);
  // The stream of the caller: on the default stream the kernel could overtake what writes its
  // inputs, and a CUDA graph could not capture it.
  auto stream = c10::cuda::getCurrentCUDAStream();
  units_kernel<<<blocks, kThreads, 0, stream>>>(batch, state_size, f);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
};

lltm::StateAndGates forward_with_gates_cuda(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  lltm::log_call("CUDA", "forward");
  lltm::check_forward(input, weights, bias, old_h, old_cell);
  // The tensors need not be on the current device.
  c10::cuda::CUDAGuard guard(input.device());
  return lltm::forward_with_gates_kernel(for_each_unit, input, weights, bias, old_h, old_cell);
}

lltm::State forward_cuda(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto [new_h, new_cell, gates] = forward_with_gates_cuda(input, weights, bias, old_h, old_cell);
  return {new_h, new_cell};
}

lltm::Gradients backward_cuda(
    const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& old_h) {
  lltm::log_call("CUDA", "backward");
  lltm::check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  c10::cuda::CUDAGuard guard(input.device());
  return lltm::backward_kernel(
      for_each_unit, grad_h, grad_cell, new_cell, gates, input, weights, old_h);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl("forward", forward_cuda);
  m.impl("_forward_with_gates", forward_with_gates_cuda);
  m.impl("backward", backward_cuda);
}
