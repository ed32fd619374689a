#pragma once

#include "element.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

// What the kernels for CPU and CUDA share: all around the loop, their ForEach.
namespace my_ops {
namespace {
using torch::stable::Tensor;
using Gradients = std::tuple<Tensor, Tensor>; // of gate and value

std::string describe(const Tensor& tensor) {
  std::ostringstream text;
  text << torch::headeronly::toString(tensor.scalar_type()) << '[';
  for (const auto& size : tensor.sizes()) {
    text << (&size == tensor.sizes().begin() ? "" : ", ") << size;
  }
  text << "] on " << (tensor.is_cpu() ? "cpu" : "cuda:");
  return tensor.is_cpu() ? text.str() : text.str() + std::to_string(tensor.get_device_index());
}

// A kernel must not read outside of its arguments. _autograd.py says the same of fake tensors.
void check(
    const char* op, const Tensor& gate,
    std::initializer_list<std::pair<const char*, const Tensor&>> others) {
  for (const auto& [name, tensor] : others) {
    if (tensor.scalar_type() != gate.scalar_type() || tensor.device() != gate.device() ||
        !tensor.sizes().equals(gate.sizes())) {
      std::ostringstream text;
      text << op << ": expected " << name << " to be like gate, " << describe(gate) << ", but got "
           << describe(tensor);
      // STD_TORCH_CHECK would begin with the path of this file where it was compiled.
      throw std::runtime_error(text.str());
    }
  }
}

Tensor empty(const Tensor& like) {
  return torch::stable::new_empty(like, like.sizes());
}

template <typename ForEach>
Tensor swiglu_forward_kernel(const Tensor& gate, const Tensor& value) {
  check("my_ops::swiglu_forward", gate, {{"value", value}});
  auto result = empty(gate);
  // A copy of what is not contiguous.
  const auto gate_ = torch::stable::contiguous(gate), value_ = torch::stable::contiguous(value);
  THO_DISPATCH_V2(
      gate.scalar_type(), "swiglu_forward", AT_WRAP([&] {
        ForEach()(
            gate,
            Forward<scalar_t>{
                gate_.const_data_ptr<scalar_t>(), value_.const_data_ptr<scalar_t>(),
                result.mutable_data_ptr<scalar_t>()});
      }),
      AT_FLOATING_TYPES, torch::headeronly::ScalarType::Half,
      torch::headeronly::ScalarType::BFloat16);
  return result;
}

template <typename ForEach>
Gradients swiglu_backward_kernel(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  check("my_ops::swiglu_backward", gate, {{"grad", grad}, {"value", value}});
  auto d_gate = empty(gate), d_value = empty(gate);
  const auto grad_ = torch::stable::contiguous(grad), gate_ = torch::stable::contiguous(gate),
             value_ = torch::stable::contiguous(value);
  THO_DISPATCH_V2(
      gate.scalar_type(), "swiglu_backward", AT_WRAP([&] {
        ForEach()(
            gate,
            Backward<scalar_t>{
                grad_.const_data_ptr<scalar_t>(), gate_.const_data_ptr<scalar_t>(),
                value_.const_data_ptr<scalar_t>(), d_gate.mutable_data_ptr<scalar_t>(),
                d_value.mutable_data_ptr<scalar_t>()});
      }),
      AT_FLOATING_TYPES, torch::headeronly::ScalarType::Half,
      torch::headeronly::ScalarType::BFloat16);
  return {d_gate, d_value};
}

} // namespace
} // namespace my_ops
