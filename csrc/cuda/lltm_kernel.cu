#include "cuda/cuda_device.cuh"
#include "cuda/lltm_impl.h"
#include "ops/dispatch.h"

#include <torch/library.h>

namespace lltm {

namespace {

ForwardResult forward_kernel(const ForwardArguments& arguments) {
  return without_gates(forward_impl<CudaDevice, false>(arguments));
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl("forward", as_kernel<forward_kernel>());
  m.impl("_forward_with_gates", as_kernel<forward_impl<CudaDevice, true>>());
  m.impl("backward", as_kernel<backward_impl<CudaDevice>>());
}

} // namespace lltm
