#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "lltm_call.h"

namespace {

lltm::State forward_autocast(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto device = input.device().type();
  lltm::log_call(device == at::kCPU ? "AutocastCPU" : "Autocast", "forward");
  // Off from here on: else the call below would come back to this function.
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto cast = [&](const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  };
  return lltm::forward(cast(input), cast(weights), cast(bias), cast(old_h), cast(old_cell));
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  m.impl("forward", forward_autocast);
}

// In PyTorch the key without a device's name is CUDA's.
TORCH_LIBRARY_IMPL(lltm, Autocast, m) {
  m.impl("forward", forward_autocast);
}
