#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "lltm.h"

// The operators, called through the dispatcher as every caller does.
namespace lltm {

template <typename Function>
auto find(const char* name, Function*) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

inline State forward(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  static auto op = find("lltm::forward", forward);
  return op.call(input, weights, bias, old_h, old_cell);
}

inline StateAndGates forward_with_gates(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  static auto op = find("lltm::_forward_with_gates", forward_with_gates);
  return op.call(input, weights, bias, old_h, old_cell);
}

inline Gradients backward(
    const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& old_h) {
  static auto op = find("lltm::backward", backward);
  return op.call(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
}

} // namespace lltm
