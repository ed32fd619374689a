#include "ops/autocast.h"

#include <ATen/autocast_mode.h>

namespace lltm {

bool autocast_applies(const at::Tensor& tensor) {
  const auto device_type = tensor.device().type();
  return (device_type == c10::kCPU || device_type == c10::kCUDA) &&
      at::autocast::is_autocast_enabled(device_type);
}

at::Tensor cast_for_autocast(
    const at::Tensor& tensor,
    c10::DeviceType device_type) {
  return at::autocast::cached_cast(
      at::autocast::get_autocast_dtype(device_type), tensor, device_type);
}

} // namespace lltm
