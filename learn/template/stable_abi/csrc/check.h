#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <sstream>
#include <stdexcept>
#include <string>

// How operators refuse an argument. The texts are built only when something is wrong.
namespace my_ops {
namespace {
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// STD_TORCH_CHECK would begin with the path of this file where it was compiled.
[[noreturn]] void refuse(const char* op, const std::string& expected) {
  throw std::runtime_error(std::string(op) + ": expected " + expected);
}

std::string describe(const Tensor& tensor, ScalarType type) {
  std::ostringstream text;
  text << torch::headeronly::toString(type) << '[';
  for (const auto& size : tensor.sizes()) {
    text << (&size == tensor.sizes().begin() ? "" : ", ") << size;
  }
  text << "] on " << (tensor.is_cpu() ? "cpu" : "cuda:");
  return tensor.is_cpu() ? text.str() : text.str() + std::to_string(tensor.get_device_index());
}

void check_type(const char* op, const std::string& name, const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  if (type != ScalarType::Double && type != ScalarType::Float && type != ScalarType::BFloat16 &&
      type != ScalarType::Half) {
    refuse(op, name + " to be float64, float32, bfloat16 or float16, but got " + toString(type));
  }
}

[[maybe_unused]] void check_like(
    const char* op, const char* name, const Tensor& tensor, ScalarType type, const char* like_name,
    const Tensor& like) {
  if (tensor.scalar_type() == type && tensor.device() == like.device() &&
      tensor.sizes().equals(like.sizes())) {
    return;
  }
  const auto expected = name + (" to be " + describe(like, type)) + ", like " + like_name;
  refuse(op, expected + ", but got " + describe(tensor, tensor.scalar_type()));
}

} // namespace
} // namespace my_ops
