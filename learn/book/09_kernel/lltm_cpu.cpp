#include <ATen/Parallel.h>
#include <torch/library.h>

#include "lltm_kernel.h"

namespace {

// A thread takes at least so many units: to start one costs as much as some thousands of them.
constexpr int64_t kUnitsPerThread = 8192;

constexpr auto for_each_unit = [](int64_t batch, int64_t state_size, auto f) {
  auto rows_per_thread = kUnitsPerThread / std::max<int64_t>(state_size, 1) + 1;
  at::parallel_for(0, batch, rows_per_thread, [=](int64_t begin, int64_t end) {
    for (auto row = begin; row < end; ++row) {
      // The compiler may compute many units at once: no unit writes what another reads.
#pragma GCC ivdep
      for (int64_t unit = 0; unit < state_size; ++unit) {
        f(row, unit);
      }
    }
  });
};

lltm::StateAndGates forward_with_gates_cpu(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  lltm::log_call("CPU", "forward");
  lltm::check_forward(input, weights, bias, old_h, old_cell);
  return lltm::forward_with_gates_kernel(for_each_unit, input, weights, bias, old_h, old_cell);
}

lltm::State forward_cpu(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto [new_h, new_cell, gates] = forward_with_gates_cpu(input, weights, bias, old_h, old_cell);
  return {new_h, new_cell};
}

lltm::Gradients backward_cpu(
    const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& old_h) {
  lltm::log_call("CPU", "backward");
  lltm::check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  return lltm::backward_kernel(
      for_each_unit, grad_h, grad_cell, new_cell, gates, input, weights, old_h);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("forward", forward_cpu);
  m.impl("_forward_with_gates", forward_with_gates_cpu);
  m.impl("backward", backward_cpu);
}
