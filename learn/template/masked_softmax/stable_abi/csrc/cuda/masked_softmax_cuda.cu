#include "../masked_softmax_kernel.h"
#include "loop.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

namespace my_ops {
namespace {
struct ForEach {
  template <typename Body>
  void operator()(const Tensor& like, const Rows& rows, const Body& body) const {
    const auto device = like.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    loop(rows, body, static_cast<cudaStream_t>(stream));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

} // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("masked_softmax_forward", TORCH_BOX(&masked_softmax_forward_kernel<ForEach>));
  m.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward_kernel<ForEach>));
}

} // namespace my_ops
