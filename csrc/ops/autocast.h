#pragma once

#include "ops/arguments.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lltm {

// Whether autocast is on for the device of tensor.
bool autocast_applies(const at::Tensor& tensor);

// Casts to the autocast dtype of a device. float64 is not cast, nor is a dtype
// that is not of floating point. The casts of weights come from autocast's
// cache.
at::Tensor cast_for_autocast(
    const at::Tensor& tensor,
    c10::DeviceType device_type);

// Calls op with autocast off; where it was on for the device of input, with all
// tensors cast. A packed call on another device comes here under the CPU's
// autocast, too, because its batch_sizes are on the CPU.
template <auto op, typename Arguments = ArgumentsOf<op>>
auto autocast_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  const bool applies = autocast_applies(arguments.input);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  if (!applies) {
    return op(arguments);
  }
  const auto device_type = arguments.input.device().type();
  return call_with_replaced_tensors(
      arguments,
      [&](const Argument<at::Tensor>& argument) {
        return cast_for_autocast(argument.value, device_type);
      },
      op);
}

} // namespace lltm
