#pragma once

#include "row.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include <sstream>
#include <stdexcept>
#include <string>

// What the kernels for CPU and CUDA share: all around the loop, their ForEach.
namespace my_ops {
namespace {
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::string describe(const Tensor& tensor, ScalarType type) {
  std::ostringstream text;
  text << torch::headeronly::toString(type) << '[';
  for (const auto& size : tensor.sizes()) {
    text << (&size == tensor.sizes().begin() ? "" : ", ") << size;
  }
  text << "] on " << (tensor.is_cpu() ? "cpu" : "cuda:");
  return tensor.is_cpu() ? text.str() : text.str() + std::to_string(tensor.get_device_index());
}

// STD_TORCH_CHECK would begin with the path of this file where it was compiled.
void expect(bool holds, const char* op, const std::string& what) {
  if (!holds) {
    throw std::runtime_error(std::string(op) + ": expected " + what);
  }
}

void check_like(
    const char* op, const char* name, const Tensor& tensor, ScalarType type, const Tensor& scores) {
  const auto fits = tensor.scalar_type() == type && tensor.device() == scores.device() &&
      tensor.sizes().equals(scores.sizes());
  const auto got = describe(tensor, tensor.scalar_type());
  expect(fits, op, name + (" to be " + describe(scores, type)) + ", like scores, but got " + got);
}

// A kernel must not read outside of its arguments. _autograd.py says the same of fake tensors.
void check(const char* op, const Tensor& scores, const Tensor& mask) {
  expect(scores.dim() > 0, op, "at least one dimension, but got a scalar");
  check_like(op, "mask", mask, ScalarType::Bool, scores);
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
            Forward<scalar_t>{
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
  check_like(op, "grad", grad, scores.scalar_type(), scores);
  auto d_scores = torch::stable::new_empty(scores, scores.sizes());
  const auto grad_ = torch::stable::contiguous(grad), scores_ = torch::stable::contiguous(scores),
             mask_ = torch::stable::contiguous(mask);
  THO_DISPATCH_V2(
      scores.scalar_type(), "masked_softmax_backward", AT_WRAP([&] {
        ForEach()(
            scores, rows_of(scores),
            Backward<scalar_t>{
                grad_.const_data_ptr<scalar_t>(), scores_.const_data_ptr<scalar_t>(),
                mask_.const_data_ptr<bool>(), d_scores.mutable_data_ptr<scalar_t>()});
      }),
      AT_FLOATING_TYPES, ScalarType::Half, ScalarType::BFloat16);
  return d_scores;
}

} // namespace
} // namespace my_ops
