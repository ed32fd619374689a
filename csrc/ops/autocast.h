#pragma once

#include "ops/arguments.h"
#include "ops/checks.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lltm {

// Whether autocast is on for the device of tensor.
inline bool autocast_applies(const at::Tensor& tensor) {
  const auto device_type = tensor.device().type();
  return (device_type == c10::kCPU || device_type == c10::kCUDA) &&
      at::autocast::is_autocast_enabled(device_type);
}

// Calls op with autocast off, and with its tensors cast to the autocast dtype
// of the device of input. The casts of weights come from autocast's cache.
// float64 is not cast, nor is a dtype that is not of floating point.
template <auto op, typename Arguments>
auto call_in_lower_precision(const Arguments& arguments) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto device_type = arguments.input.device().type();
  const auto dtype = at::autocast::get_autocast_dtype(device_type);
  return call_with_mapped_tensors(
      arguments,
      [&](const Field<at::Tensor>& field) {
        return at::autocast::cached_cast(dtype, field.value, device_type);
      },
      op);
}

// The Autocast kernel of op. A packed call on another device comes here under
// the CPU's autocast, too, because its batch_sizes are on the CPU.
template <auto op, typename Arguments = ArgumentsOf<op>>
auto autocast_kernel(const Arguments& arguments) {
  check_devices(arguments);
  if (!autocast_applies(arguments.input)) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(
        c10::autocast_dispatch_keyset);
    return op(arguments);
  }
  return call_in_lower_precision<op>(arguments);
}

} // namespace lltm
