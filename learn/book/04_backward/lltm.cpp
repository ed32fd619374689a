#include "lltm.h"

#include <torch/library.h>

#include <cstdlib>
#include <iostream>

namespace lltm {
namespace {

void check(
    const char* op, const char* name, const at::Tensor& tensor, const at::Tensor& input,
    c10::SymIntArrayRef sizes) {
  TORCH_CHECK(
      tensor.sym_sizes() == sizes, op, ": expected ", name, " to have sizes ", sizes, ", but got ",
      tensor.sym_sizes());
  TORCH_CHECK(
      tensor.scalar_type() == input.scalar_type() && tensor.device() == input.device(), op,
      ": expected ", name, " to be ", input.scalar_type(), " on ", input.device(),
      ", as input is, but got ", tensor.scalar_type(), " on ", tensor.device());
}

void check_dimensions(const char* op, const at::Tensor& input, const at::Tensor& old_h) {
  TORCH_CHECK(
      input.dim() == 2 && old_h.dim() == 2, op,
      ": expected input and old_h to have 2 dimensions, but got ", input.dim(), " and ",
      old_h.dim());
}

} // namespace

void check_forward(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  const auto* op = "lltm::forward";
  check_dimensions(op, input, old_h);
  auto batch = input.sym_size(0), state_size = old_h.sym_size(1);
  check(op, "weights", weights, input, {3 * state_size, state_size + input.sym_size(1)});
  check(op, "bias", bias, input, {3 * state_size});
  check(op, "old_h", old_h, input, {batch, state_size});
  check(op, "old_cell", old_cell, input, {batch, state_size});
}

void check_backward(
    const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& old_h) {
  const auto* op = "lltm::backward";
  check_dimensions(op, input, old_h);
  auto batch = input.sym_size(0), state_size = old_h.sym_size(1);
  check(op, "grad_h", grad_h, input, {batch, state_size});
  check(op, "grad_cell", grad_cell, input, {batch, state_size});
  check(op, "new_cell", new_cell, input, {batch, state_size});
  check(op, "gates", gates, input, {batch, 3 * state_size});
  check(op, "weights", weights, input, {3 * state_size, state_size + input.sym_size(1)});
  check(op, "old_h", old_h, input, {batch, state_size});
}

void log_call(const char* dispatch_key, const char* operator_name) {
  static const bool on = std::getenv("LLTM_LOG_CALLS") != nullptr;
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
