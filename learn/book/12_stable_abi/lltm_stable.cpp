#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "units.h"

namespace {

using torch::stable::Tensor;

// An operator of ATen by its name: the headers have functions for a few only.
template <typename... Arguments>
Tensor call(const char* op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor features(const Tensor& old_h, const Tensor& input) {
  return call("aten::cat", std::vector<Tensor>{old_h, input}, int64_t(1));
}

void check(
    const char* name, const Tensor& tensor, const Tensor& input,
    const std::vector<int64_t>& sizes) {
  if (!tensor.sizes().equals(sizes) || tensor.scalar_type() != input.scalar_type()) {
    std::string text = std::string("lltm_stable: expected ") + name + " of the dtype of input, [";
    for (const auto& size : sizes) {
      text += std::to_string(size) + (&size == &sizes.back() ? "" : ", ");
    }
    // STD_TORCH_CHECK would begin with the path of this file where it was compiled.
    throw std::runtime_error(text + "]");
  }
}

void check_dimensions(const Tensor& input, const Tensor& old_h) {
  if (input.dim() != 2 || old_h.dim() != 2) {
    throw std::runtime_error("lltm_stable: expected input and old_h to have 2 dimensions");
  }
}

template <typename Unit>
void for_each_unit(int64_t batch, int64_t state_size, const Unit& unit) {
  auto rows_per_thread = 8192 / std::max<int64_t>(state_size, 1) + 1;
  torch::stable::parallel_for(0, batch, rows_per_thread, [=](int64_t begin, int64_t end) {
    for (auto row = begin; row < end; ++row) {
#pragma GCC ivdep
      for (int64_t k = 0; k < state_size; ++k) {
        unit(row, k);
      }
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> forward_cpu(
    const Tensor& input, const Tensor& weights, const Tensor& bias, const Tensor& old_h,
    const Tensor& old_cell) {
  check_dimensions(input, old_h);
  auto batch = input.size(0), size = old_h.size(1);
  check("weights", weights, input, {3 * size, size + input.size(1)});
  check("bias", bias, input, {3 * size});
  check("old_h", old_h, input, {batch, size});
  check("old_cell", old_cell, input, {batch, size});
  auto gates = call("aten::linear", features(old_h, input), weights, std::optional<Tensor>(bias));
  auto cell = torch::stable::contiguous(old_cell);
  auto new_h = torch::stable::empty_like(cell), new_cell = torch::stable::empty_like(cell);
  THO_DISPATCH_V2(
      input.scalar_type(), "lltm_forward", AT_WRAP([&] {
        for_each_unit(
            batch, size,
            lltm::ForwardUnit<scalar_t>{
                gates.mutable_data_ptr<scalar_t>(), cell.const_data_ptr<scalar_t>(),
                new_h.mutable_data_ptr<scalar_t>(), new_cell.mutable_data_ptr<scalar_t>(), size});
      }),
      AT_FLOATING_TYPES, torch::headeronly::ScalarType::Half,
      torch::headeronly::ScalarType::BFloat16);
  return {new_h, new_cell, gates};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_cpu(
    const Tensor& grad_h, const Tensor& grad_cell, const Tensor& new_cell, const Tensor& gates,
    const Tensor& input, const Tensor& weights, const Tensor& old_h) {
  check_dimensions(input, old_h);
  auto batch = input.size(0), size = old_h.size(1);
  check("grad_h", grad_h, input, {batch, size});
  check("grad_cell", grad_cell, input, {batch, size});
  check("new_cell", new_cell, input, {batch, size});
  check("gates", gates, input, {batch, 3 * size});
  check("weights", weights, input, {3 * size, size + input.size(1)});
  check("old_h", old_h, input, {batch, size});
  auto d_gates = torch::stable::clone(torch::stable::contiguous(gates));
  auto h = torch::stable::contiguous(grad_h), c = torch::stable::contiguous(grad_cell);
  auto cell = torch::stable::contiguous(new_cell);
  auto d_old_cell = torch::stable::empty_like(cell);
  THO_DISPATCH_V2(
      input.scalar_type(), "lltm_backward", AT_WRAP([&] {
        for_each_unit(
            batch, size,
            lltm::BackwardUnit<scalar_t>{
                d_gates.mutable_data_ptr<scalar_t>(), cell.const_data_ptr<scalar_t>(),
                h.const_data_ptr<scalar_t>(), c.const_data_ptr<scalar_t>(),
                d_old_cell.mutable_data_ptr<scalar_t>(), size});
      }),
      AT_FLOATING_TYPES, torch::headeronly::ScalarType::Half,
      torch::headeronly::ScalarType::BFloat16);
  Tensor w = weights;
  auto d_old_h = torch::stable::matmul(d_gates, torch::stable::narrow(w, 1, 0, size));
  auto d_input = torch::stable::matmul(d_gates, torch::stable::narrow(w, 1, size, input.size(1)));
  auto d_weights =
      torch::stable::matmul(torch::stable::transpose(d_gates, 0, 1), features(old_h, input));
  std::array<int64_t, 1> rows{0};
  return {d_input, d_weights, torch::stable::sum(d_gates, rows), d_old_h, d_old_cell};
}

} // namespace

// A namespace of its own, so that one process can compare it with chapter 9.
STABLE_TORCH_LIBRARY(lltm_stable, m) {
  m.def(
      "forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell)"
      " -> (Tensor new_h, Tensor new_cell, Tensor gates)");
  m.def(
      "backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, Tensor gates, Tensor input,"
      " Tensor weights, Tensor old_h) -> (Tensor d_input, Tensor d_weights, Tensor d_bias,"
      " Tensor d_old_h, Tensor d_old_cell)");
}

STABLE_TORCH_LIBRARY_IMPL(lltm_stable, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward_cpu));
  m.impl("backward", TORCH_BOX(&backward_cpu));
}
