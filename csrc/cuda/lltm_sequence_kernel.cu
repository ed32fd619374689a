#include "cuda/launch_pointwise.cuh"
#include "cuda/lltm_sequence_impl.h"
#include "cuda/recurrence/launch.h"
#include "ops/dispatch.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/env.h>
#include <torch/library.h>

namespace lltm {

namespace {

struct CudaDevice {
  using Guard = c10::cuda::CUDAGuard;

  // The memory of a chunk's gates if they are not wanted.
  static constexpr int64_t kBytesOfGates = 64 << 20;

  template <typename Body>
  static void pointwise(int64_t rows, int64_t columns, const Body& body) {
    launch_pointwise(rows, columns, body);
  }

  static void
  mm_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
    if (out.scalar_type() == a.scalar_type()) {
      at::mm_out(out, a, b);
    } else {
      at::mm_out(out, a, b, out.scalar_type());
    }
  }

  static void fill_sentinel(const at::Tensor& tensor) {
    C10_CUDA_CHECK(cudaMemsetAsync(
        tensor.mutable_data_ptr(),
        0xff,
        tensor.nbytes(),
        c10::cuda::getCurrentCUDAStream()));
  }

  // The environment decides. By default it is on for GPUs on which it has been
  // measured (docs/cuda.md).
  static bool recurrence_is_on() {
    const auto asked = c10::utils::check_env("LLTM_CUDA_RECURRENCE");
    int device = 0, major = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(
        &major, cudaDevAttrComputeCapabilityMajor, device));
    return asked.value_or(major == 9);
  }

  // Of Forward or Backward. Returns false, and has done nothing, where the GPU
  // cannot.
  template <typename Args>
  static bool run_recurrence(const Args& args) {
    return recurrence::launch(args, c10::cuda::getCurrentCUDAStream());
  }
};

ForwardResult sequence_forward_kernel(
    const SequenceForwardArguments& arguments) {
  return without_gates(sequence_forward_impl<CudaDevice, false>(arguments));
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl("sequence_forward", as_kernel<sequence_forward_kernel>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<sequence_forward_impl<CudaDevice, true>>());
  m.impl("sequence_backward", as_kernel<sequence_backward_impl<CudaDevice>>());
}

} // namespace lltm
