#include "cuda/cuda_device.cuh"
#include "cuda/lltm_sequence_backward.h"
#include "cuda/lltm_sequence_forward.h"
#include "cuda/recurrence/cuda_launch.h"
#include "ops/dispatch.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/env.h>
#include <torch/library.h>

namespace lltm {

namespace {

struct CudaSequenceDevice : CudaDevice {
  static constexpr int64_t kBytesOfGates = 64 << 20;

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

  // The environment decides, or else it is on where it has been measured
  // (docs/cuda.md).
  static bool recurrence_is_on() {
    const auto asked = c10::utils::check_env("LLTM_CUDA_RECURRENCE");
    int device = 0, major = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(
        &major, cudaDevAttrComputeCapabilityMajor, device));
    return asked.value_or(major == 9);
  }

  template <typename Args>
  static std::string launch_recurrence(const Args& args, Stream stream) {
    // The first launch loads the kernel, which may allocate and synchronise. A
    // capture in this thread or another may forbid that, but it is no part of
    // the stream, so a graph loses nothing.
    const c10::cuda::CUDAStreamCaptureModeGuard guard(
        cudaStreamCaptureModeRelaxed);
    return recurrence::cuda_launch(args, stream);
  }
};

} // namespace

// For tests and benchmarks: which way was taken shows in no result.
TORCH_LIBRARY_FRAGMENT(lltm, m) {
  m.def("_recurrence_launches() -> int[]", [] {
    return std::vector<int64_t>(launches.begin(), launches.end());
  });
}

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl(
      "sequence_forward",
      as_kernel<
          without_gates<sequence_forward_impl<CudaSequenceDevice, false>>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<sequence_forward_impl<CudaSequenceDevice, true>>());
  m.impl(
      "sequence_backward",
      as_kernel<sequence_backward_impl<CudaSequenceDevice>>());
}

} // namespace lltm
