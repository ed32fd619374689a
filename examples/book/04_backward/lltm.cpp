#include "lltm.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstdlib>
#include <iostream>

namespace lltm {
namespace {

template <typename Function>
auto find(const char* name, Function*) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

void check(const char* name, const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  TORCH_CHECK(
      tensor.sym_sizes() == sizes, "lltm::forward: expected ", name, " to have sizes ", sizes,
      ", but got ", tensor.sym_sizes());
}

} // namespace

State forward(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  static auto op = find("lltm::forward", forward);
  return op.call(input, weights, bias, old_h, old_cell);
}

StateAndGates forward_with_gates(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  static auto op = find("lltm::_forward_with_gates", forward_with_gates);
  return op.call(input, weights, bias, old_h, old_cell);
}

Gradients backward(
    const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& old_h) {
  static auto op = find("lltm::backward", backward);
  return op.call(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
}

void check_forward(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  TORCH_CHECK(
      input.dim() == 2 && old_h.dim() == 2,
      "lltm::forward: expected input and old_h to have 2 dimensions, but got ", input.dim(),
      " and ", old_h.dim());
  auto batch = input.sym_size(0), state_size = old_h.sym_size(1);
  check("weights", weights, {3 * state_size, state_size + input.sym_size(1)});
  check("bias", bias, {3 * state_size});
  check("old_h", old_h, {batch, state_size});
  check("old_cell", old_cell, {batch, state_size});
  for (const auto& tensor : {weights, bias, old_h, old_cell}) {
    TORCH_CHECK(
        tensor.scalar_type() == input.scalar_type(),
        "lltm::forward: expected all arguments to have the dtype of input, ", input.scalar_type(),
        ", but got ", tensor.scalar_type());
  }
}

void trace(const char* dispatch_key, const char* operator_name) {
  static const bool on = std::getenv("LLTM_TRACE") != nullptr;
  if (on) {
    std::cout << dispatch_key << ": " << operator_name << std::endl;
  }
}

} // namespace lltm

TORCH_LIBRARY(lltm, m) {
  m.def(
      "forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell)"
      " -> (Tensor new_h, Tensor new_cell)");
  m.def(
      "_forward_with_gates(Tensor input, Tensor weights, Tensor bias, Tensor old_h,"
      " Tensor old_cell) -> (Tensor new_h, Tensor new_cell, Tensor gates)");
  m.def(
      "backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, Tensor gates, Tensor input,"
      " Tensor weights, Tensor old_h) -> (Tensor d_input, Tensor d_weights, Tensor d_bias,"
      " Tensor d_old_h, Tensor d_old_cell)");
}
