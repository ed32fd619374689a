#pragma once

#include "check.h"
#include "masked_softmax_row.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch_v2.h>

// What the kernels for CPU and CUDA share: all around the loop, their ForEach.
namespace my_ops {
namespace {
// A kernel must not read outside of its arguments. _masked_softmax.py says the same of fake
// tensors.
void check(const char* op, const Tensor& scores, const Tensor& mask) {
  check_type(op, "scores", scores);
  if (scores.dim() == 0) {
    refuse(op, "at least one dimension, but got a scalar");
  }
  check_like(op, "mask", mask, ScalarType::Bool, "scores", scores);
}

Rows rows_of(const Tensor& scores) {
  return {scores.numel(), std::max<int64_t>(scores.sizes().back(), 1)};
}

template <typename ForEach>
Tensor masked_softmax_forward_kernel(const Tensor& scores, const Tensor& mask) {
  check("my_ops::masked_softmax_forward", scores, mask);
  auto result = torch::stable::new_empty(scores, scores.sizes());
  // A copy of what is not contiguous.
  const auto scores_ = torch::stable::contiguous(scores), mask_ = torch::stable::contiguous(mask);
  THO_DISPATCH_V2(
      scores.scalar_type(), "masked_softmax_forward", AT_WRAP([&] {
        ForEach()(
            scores, rows_of(scores),
            MaskedSoftmaxForward<scalar_t>{
                scores_.const_data_ptr<scalar_t>(), mask_.const_data_ptr<bool>(),
                result.mutable_data_ptr<scalar_t>()});
      }),
      AT_FLOATING_TYPES, ScalarType::Half, ScalarType::BFloat16);
  return result;
}

template <typename ForEach>
Tensor masked_softmax_backward_kernel(
    const Tensor& grad, const Tensor& scores, const Tensor& mask) {
  const auto op = "my_ops::masked_softmax_backward";
  check(op, scores, mask);
  check_like(op, "grad", grad, scores.scalar_type(), "scores", scores);
  auto d_scores = torch::stable::new_empty(scores, scores.sizes());
  const auto grad_ = torch::stable::contiguous(grad), scores_ = torch::stable::contiguous(scores),
             mask_ = torch::stable::contiguous(mask);
  THO_DISPATCH_V2(
      scores.scalar_type(), "masked_softmax_backward", AT_WRAP([&] {
        ForEach()(
            scores, rows_of(scores),
            MaskedSoftmaxBackward<scalar_t>{
                grad_.const_data_ptr<scalar_t>(), scores_.const_data_ptr<scalar_t>(),
                mask_.const_data_ptr<bool>(), d_scores.mutable_data_ptr<scalar_t>()});
      }),
      AT_FLOATING_TYPES, ScalarType::Half, ScalarType::BFloat16);
  return d_scores;
}

} // namespace
} // namespace my_ops
