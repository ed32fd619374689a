#pragma once

#include "ops/lltm.h"

namespace lltm {

// Whether autocast is on for the device of tensor.
bool autocast_applies(const at::Tensor& tensor);

// tensor in the autocast dtype of its device, from autocast's cache of weights.
at::Tensor cast_for_autocast(const at::Tensor& tensor);

// Calls op with all arguments in the autocast dtype and autocast off.
template <typename Op>
auto call_in_lower_precision(
    const Op& op,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return op(
      cast_for_autocast(input),
      cast_for_autocast(weights),
      cast_for_autocast(bias),
      cast_for_autocast(old_h),
      cast_for_autocast(old_cell));
}

} // namespace lltm
