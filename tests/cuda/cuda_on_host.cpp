// What the CUDA kernels compute, on the host: the operators of
// test_cuda_without_gpu.py. Pointwise kernels run thread by thread, the
// recurrence in the emulator.

#include "cuda/lltm_pointwise.h"
#include "cuda/lltm_sequence_impl.h"
#include "cuda/row_grid.h"
#include "ops/dispatch.h"
#include "recurrence/emulated_backend.h"

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstring>
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
std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& gates,
    const at::Tensor& old_cell) {
  auto new_h = at::empty_like(old_cell);
  auto new_cell = at::empty_like(old_cell);
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
  return {new_h, new_cell};
}

// (d_gates, d_cell)
std::tuple<at::Tensor, at::Tensor> backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates) {
  auto d_gates = at::empty_like(gates);
  auto d_cell = at::empty_like(grad_cell);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, gates.scalar_type(), "backward", [&] {
        run_grid(
            new_cell.size(0),
            new_cell.size(1),
            lltm::BackwardUnit<scalar_t>{
                new_cell.size(1),
                grad_h.const_data_ptr<scalar_t>(),
                grad_cell.const_data_ptr<scalar_t>(),
                new_cell.const_data_ptr<scalar_t>(),
                gates.const_data_ptr<scalar_t>(),
                d_gates.mutable_data_ptr<scalar_t>(),
                d_cell.mutable_data_ptr<scalar_t>()});
      });
  return {d_gates, d_cell};
}

// What a GPU does with a sequence. The launches that it accepts: of 0, steps
// run one by one.
int64_t accepted_launches = 0;
int64_t recurrences = 0;

struct HostDevice {
  // So that a few steps are several chunks.
  static constexpr int64_t kBytesOfGates = 4096;

  struct Guard {
    explicit Guard(c10::Device) {}
  };

  template <typename Body>
  static void pointwise(int64_t rows, int64_t columns, const Body& body) {
    run_grid(rows, columns, body);
  }

  static void
  mm_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
    out.copy_(a.to(out.scalar_type()).mm(b.to(out.scalar_type())));
  }

  static bool recurrence_is_on() {
    return accepted_launches > 0;
  }

  static void fill_sentinel(const at::Tensor& tensor) {
    std::memset(tensor.mutable_data_ptr(), 0xff, tensor.nbytes());
  }

  template <typename Args>
  static bool run_recurrence(const Args& args) {
    if (accepted_launches-- <= 0) {
      return false;
    }
    ++recurrences;
    const int tiles = 1 << recurrences % 3;
    backend::run_recurrence(args, tiles, recurrences, {});
    return true;
  }
};

// Returns how many launches there were so far.
int64_t accept_launches(int64_t count) {
  accepted_launches = count;
  return recurrences;
}

} // namespace

TORCH_LIBRARY(lltm_on_host, m) {
  m.def("visits(int rows, int columns) -> Tensor", visits);
  m.def(
      "forward(Tensor gates, Tensor old_cell) -> (Tensor, Tensor)",
      forward<false>);
  m.def(
      "forward_with_gates(Tensor(a!) gates, Tensor old_cell) -> "
      "(Tensor, Tensor)",
      forward<true>);
  m.def(
      "backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, "
      "Tensor gates) -> (Tensor, Tensor)",
      backward);
  m.def("accept_launches(int count) -> int", accept_launches);
  m.def(
      "sequence_forward(Tensor input, Tensor weights, Tensor bias, Tensor h0, "
      "Tensor c0, Tensor? batch_sizes=None, bool reverse=False, "
      "Tensor? resets=None) -> (Tensor, Tensor, Tensor)",
      lltm::as_kernel<lltm::sequence_forward_impl<HostDevice, false>>());
  m.def(
      "sequence_forward_with_gates(Tensor input, Tensor weights, Tensor bias, "
      "Tensor h0, Tensor c0, Tensor? batch_sizes=None, bool reverse=False, "
      "Tensor? resets=None) -> (Tensor, Tensor, Tensor)",
      lltm::as_kernel<lltm::sequence_forward_impl<HostDevice, true>>());
  m.def(
      "sequence_backward(Tensor grad_output, Tensor grad_cells, Tensor output, "
      "Tensor cells, Tensor gates, Tensor input, Tensor weights, Tensor h0, "
      "Tensor? batch_sizes=None, bool reverse=False, Tensor? resets=None, "
      "bool[5] output_mask=[True, True, True, True, True]) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)",
      lltm::as_kernel<lltm::sequence_backward_impl<HostDevice>>());
}
