#include "cuda/cuda_device.cuh"
#include "cuda/lltm_impl.h"
#include "ops/dispatch.h"

#include <torch/library.h>

namespace lltm {

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl(
      "forward", as_kernel<without_gates<forward_impl<CudaDevice, false>>>());
  m.impl("_forward_with_gates", as_kernel<forward_impl<CudaDevice, true>>());
  m.impl("backward", as_kernel<backward_impl<CudaDevice>>());
}

} // namespace lltm
