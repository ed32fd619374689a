#include "../kernel.h"
#include "loop.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace my_ops {
namespace {
struct ForEach {
  template <typename Body>
  void operator()(int64_t size, const Body& body) const {
    loop(size, body, c10::cuda::getCurrentCUDAStream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

} // namespace

TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("swiglu", swiglu_kernel<ForEach>);
  m.impl("swiglu_backward", swiglu_backward_kernel<ForEach>);
}

} // namespace my_ops
