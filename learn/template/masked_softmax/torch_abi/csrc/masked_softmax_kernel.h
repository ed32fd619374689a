#pragma once

#include "masked_softmax.h"
#include "masked_softmax_row.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

// What the kernels for CPU and CUDA share: all around the loop, their ForEach.
namespace my_ops {

inline Rows rows_of(const Tensor& scores) {
  return {scores.numel(), std::max<int64_t>(scores.size(-1), 1)};
}

template <typename ForEach>
Tensor masked_softmax_kernel(const Tensor& scores, const Tensor& mask) {
  check(scores, mask);
  const c10::DeviceGuard guard(scores.device());
  auto result = at::empty(scores.sizes(), scores.options());
  // A copy of what is not contiguous.
  const auto scores_ = scores.expect_contiguous(), mask_ = mask.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, scores.scalar_type(), "masked_softmax", [&] {
        const MaskedSoftmaxForward<scalar_t> body{
            scores_->const_data_ptr<scalar_t>(), mask_->const_data_ptr<bool>(),
            result.mutable_data_ptr<scalar_t>()};
        ForEach()(rows_of(scores), body);
      });
  return result;
}

template <typename ForEach>
Tensor masked_softmax_backward_kernel(
    const Tensor& grad, const Tensor& scores, const Tensor& mask) {
  check(grad, scores, mask);
  const c10::DeviceGuard guard(scores.device());
  auto d_scores = at::empty(scores.sizes(), scores.options());
  const auto grad_ = grad.expect_contiguous(), scores_ = scores.expect_contiguous(),
             mask_ = mask.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, scores.scalar_type(), "masked_softmax", [&] {
        const MaskedSoftmaxBackward<scalar_t> body{
            grad_->const_data_ptr<scalar_t>(), scores_->const_data_ptr<scalar_t>(),
            mask_->const_data_ptr<bool>(), d_scores.mutable_data_ptr<scalar_t>()};
        ForEach()(rows_of(scores), body);
      });
  return d_scores;
}

} // namespace my_ops
