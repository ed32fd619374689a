#include "ops/lltm_autocast.h"

#include "ops/lltm_checks.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

// Autocast: all arguments in the autocast dtype, as for lstm_cell. backward has
// no kernel here: it keeps the dtypes of what forward saved.
namespace lltm {

bool autocast_applies(const at::Tensor& tensor) {
  const auto device_type = tensor.device().type();
  return (device_type == c10::kCPU || device_type == c10::kCUDA) &&
      at::autocast::is_autocast_enabled(device_type);
}

at::Tensor cast_for_autocast(const at::Tensor& tensor) {
  const auto device_type = tensor.device().type();
  return at::autocast::cached_cast(
      at::autocast::get_autocast_dtype(device_type), tensor, device_type);
}

namespace {

ForwardResult forward_autocast(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward_devices(input, weights, bias, old_h, old_cell);
  return call_in_lower_precision(
      forward, input, weights, bias, old_h, old_cell);
}

ForwardWithGatesResult forward_with_gates_autocast(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward_devices(input, weights, bias, old_h, old_cell);
  return call_in_lower_precision(
      _forward_with_gates, input, weights, bias, old_h, old_cell);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  m.impl("forward", TORCH_FN(forward_autocast));
  m.impl("_forward_with_gates", TORCH_FN(forward_with_gates_autocast));
}

// The key AutocastCUDA is called Autocast inside PyTorch.
TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  m.impl("forward", TORCH_FN(forward_autocast));
  m.impl("_forward_with_gates", TORCH_FN(forward_with_gates_autocast));
}

} // namespace lltm
