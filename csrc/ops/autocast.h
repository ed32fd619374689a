#pragma once

#include "ops/arguments.h"
#include "ops/checks.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>

#include <utility>

namespace lltm {

// Whether autocast is on for the device of tensor.
bool autocast_applies(const at::Tensor& tensor);

// Casts to the autocast dtype of a device. float64 is not cast, nor is a dtype
// that is not of floating point. The casts of weights come from autocast's
// cache.
at::Tensor cast_for_autocast(
    const at::Tensor& tensor,
    c10::DeviceType device_type);

// Whether call_in_lower_precision() runs on this thread.
inline thread_local bool is_in_lower_precision = false;

// Whether operators that a composite formula calls are autocast even though
// autocast is off: a transform of torch.func sends each of them on with the
// keys that the thread had when the transform began. Autocast leaves only
// float64 alone.
bool transform_brings_autocast_back(const at::Tensor& tensor);

// Calls op with autocast off, and with its tensors cast for the device of
// input.
template <auto op, typename Arguments>
auto call_in_lower_precision(const Arguments& arguments) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const bool before = std::exchange(is_in_lower_precision, true);
  const auto restored =
      c10::make_scope_exit([&] { is_in_lower_precision = before; });
  const auto device_type = arguments.input.device().type();
  return call_with_mapped_tensors(
      arguments,
      [&](const Field<at::Tensor>& field) {
        return cast_for_autocast(field.value, device_type);
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
