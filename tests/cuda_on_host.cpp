// What the CUDA kernels compute, thread by thread, on the host: the operators
// of test_cuda_on_host.py.

#include "cuda/lltm_pointwise.h"
#include "cuda/row_grid.h"

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

namespace {

template <typename Body>
void run_grid(int64_t rows, int64_t columns, const Body& body) {
  const auto grid = lltm::grid_for(rows, columns);
  for (unsigned y = 0; y < grid.rows; ++y) {
    for (unsigned x = 0; x < grid.columns; ++x) {
      for (int thread = 0; thread < lltm::kThreads; ++thread) {
        lltm::for_each_of_thread(grid, {x, y}, thread, rows, columns, body);
      }
    }
  }
}

// How often the grid comes by each element.
at::Tensor visits(int64_t rows, int64_t columns) {
  auto counts = at::zeros({rows, columns}, at::kChar);
  auto* data = counts.mutable_data_ptr<int8_t>();
  run_grid(rows, columns, [&](int64_t row, int64_t column) {
    ++data[row * columns + column];
  });
  return counts;
}

template <bool write_gates>
void forward(
    const at::Tensor& gates,
    const at::Tensor& old_cell,
    const at::Tensor& new_h,
    const at::Tensor& new_cell) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "forward", [&] {
        run_grid(
            old_cell.size(0),
            old_cell.size(1),
            lltm::ForwardUnit<scalar_t, write_gates>{
                old_cell.size(1),
                gates.mutable_data_ptr<scalar_t>(),
                old_cell.const_data_ptr<scalar_t>(),
                new_h.mutable_data_ptr<scalar_t>(),
                new_cell.mutable_data_ptr<scalar_t>()});
      });
}

// Overwrites gates if they are to be kept.
std::tuple<at::Tensor, at::Tensor> pointwise_forward(
    const at::Tensor& gates,
    const at::Tensor& old_cell,
    bool write_gates) {
  auto new_h = at::empty_like(old_cell);
  auto new_cell = at::empty_like(old_cell);
  (write_gates ? forward<true>
               : forward<false>)(gates, old_cell, new_h, new_cell);
  return {new_h, new_cell};
}

template <bool in_sequence>
void backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& d_h,
    const at::Tensor& d_gates,
    const at::Tensor& d_cell) {
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "backward", [&] {
        using Unit = lltm::BackwardUnit<scalar_t, in_sequence>;
        run_grid(
            new_cell.size(0),
            new_cell.size(1),
            Unit{
                new_cell.size(1),
                grad_h.const_data_ptr<scalar_t>(),
                grad_cell.const_data_ptr<scalar_t>(),
                new_cell.const_data_ptr<scalar_t>(),
                gates.const_data_ptr<scalar_t>(),
                in_sequence ? d_h.const_data_ptr<scalar_t>() : nullptr,
                d_gates.mutable_data_ptr<scalar_t>(),
                d_cell.mutable_data_ptr<typename Unit::d_cell_t>()});
      });
}

// d_h, and what d_cell holds, count if in_sequence.
at::Tensor pointwise_backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& d_h,
    const at::Tensor& d_cell,
    bool in_sequence) {
  auto d_gates = at::empty_like(gates);
  (in_sequence ? backward<true> : backward<false>)(grad_h,
                                                   grad_cell,
                                                   new_cell,
                                                   gates,
                                                   d_h,
                                                   d_gates,
                                                   d_cell);
  return d_gates;
}

} // namespace

TORCH_LIBRARY(lltm_on_host, m) {
  m.def("visits(int rows, int columns) -> Tensor", visits);
  m.def(
      "forward(Tensor(a!) gates, Tensor old_cell, bool write_gates) -> "
      "(Tensor, Tensor)",
      pointwise_forward);
  m.def(
      "backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, "
      "Tensor gates, Tensor d_h, Tensor(a!) d_cell, bool in_sequence) -> "
      "Tensor",
      pointwise_backward);
}
