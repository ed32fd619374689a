#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>

#include "lltm.h"

namespace lltm {

// A step out of ATen's operators. Each of them has derivatives of every order.
inline State formula(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto pre_activations = at::linear(at::cat({old_h, input}, 1), weights, bias);
  auto gates = pre_activations.chunk(3, 1);
  auto new_cell = old_cell + at::elu(gates[2]) * at::sigmoid(gates[0]);
  return {at::tanh(new_cell) * at::sigmoid(gates[1]), new_cell};
}

} // namespace lltm
