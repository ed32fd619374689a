#include "ops/gate_math.h"
#include "ops/lltm.h"
#include "ops/lltm_checks.h"
#include "ops/lltm_linear.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

namespace lltm {

namespace {

// Hidden units per task: below about this many, waking a thread costs more than
// the transcendental functions of the units.
constexpr int64_t kGrainSize = 2048;

template <typename Fn>
void for_each_row(int64_t batch, int64_t state_size, const Fn& fn) {
  const auto rows_per_task =
      std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, state_size));
  at::parallel_for(0, batch, rows_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      fn(row);
    }
  });
}

// One row of the batch. gates holds the pre-activations, and takes the
// activated gates if write_gates.
template <typename scalar_t, bool write_gates>
void forward_row(
    int64_t state_size,
    scalar_t* gates,
    const scalar_t* old_cell,
    scalar_t* new_h,
    scalar_t* new_cell) {
  using opmath_t = at::opmath_type<scalar_t>;
  scalar_t* input_gate = gates;
  scalar_t* output_gate = gates + state_size;
  scalar_t* candidate = gates + 2 * state_size;
  for (int64_t i = 0; i < state_size; ++i) {
    const auto out = cell_forward<opmath_t>(
        input_gate[i], output_gate[i], candidate[i], old_cell[i]);
    new_h[i] = out.new_h;
    new_cell[i] = out.new_cell;
    if constexpr (write_gates) {
      input_gate[i] = out.input_gate;
      output_gate[i] = out.output_gate;
      candidate[i] = out.candidate;
    }
  }
}

template <typename scalar_t>
struct BackwardRow {
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  scalar_t* d_gates;
  scalar_t* d_old_cell;
};

// One row of the batch. d_gates may be null: nobody needs it.
template <typename scalar_t>
void backward_row(int64_t state_size, const BackwardRow<scalar_t>& row) {
  using opmath_t = at::opmath_type<scalar_t>;
  for (int64_t i = 0; i < state_size; ++i) {
    const auto out = cell_backward<opmath_t>(
        row.grad_h[i],
        row.grad_cell[i],
        row.new_cell[i],
        row.gates[i],
        row.gates[i + state_size],
        row.gates[i + 2 * state_size]);
    row.d_old_cell[i] = out.d_old_cell;
    if (row.d_gates != nullptr) {
      row.d_gates[i] = out.d_input_gate;
      row.d_gates[i + state_size] = out.d_output_gate;
      row.d_gates[i + 2 * state_size] = out.d_candidate;
    }
  }
}

template <bool write_gates>
ForwardWithGatesResult forward_kernel_impl(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward(input, weights, bias, old_h, old_cell);
  const auto batch = input.size(0);
  const auto state_size = old_h.size(1);
  auto gates = linear_gates(input, weights, bias, old_h);
  auto new_h = at::empty({batch, state_size}, input.options());
  auto new_cell = at::empty({batch, state_size}, input.options());
  const auto old_cell_ = old_cell.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "lltm_forward_cpu", [&] {
        auto* const gates_data = gates.mutable_data_ptr<scalar_t>();
        const auto* const old_cell_data =
            old_cell_->const_data_ptr<scalar_t>();
        auto* const new_h_data = new_h.mutable_data_ptr<scalar_t>();
        auto* const new_cell_data = new_cell.mutable_data_ptr<scalar_t>();
        for_each_row(batch, state_size, [&](int64_t row) {
          const auto offset = row * state_size;
          forward_row<scalar_t, write_gates>(
              state_size,
              gates_data + 3 * offset,
              old_cell_data + offset,
              new_h_data + offset,
              new_cell_data + offset);
        });
      });
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

ForwardResult forward_kernel(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  auto [new_h, new_cell, gates] =
      forward_kernel_impl<false>(input, weights, bias, old_h, old_cell);
  return {std::move(new_h), std::move(new_cell)};
}

BackwardResult backward_kernel(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  const auto batch = input.size(0);
  const auto state_size = old_h.size(1);
  const auto grad_h_ = grad_h.expect_contiguous();
  const auto grad_cell_ = grad_cell.expect_contiguous();
  const auto new_cell_ = new_cell.expect_contiguous();
  const auto gates_ = gates.expect_contiguous();
  at::Tensor d_gates;
  if (needs_d_gates(output_mask)) {
    d_gates = at::empty({batch, 3 * state_size}, input.options());
  }
  auto d_old_cell = at::empty({batch, state_size}, input.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "lltm_backward_cpu", [&] {
        const BackwardRow<scalar_t> first{
            grad_h_->const_data_ptr<scalar_t>(),
            grad_cell_->const_data_ptr<scalar_t>(),
            new_cell_->const_data_ptr<scalar_t>(),
            gates_->const_data_ptr<scalar_t>(),
            d_gates.defined() ? d_gates.mutable_data_ptr<scalar_t>() : nullptr,
            d_old_cell.mutable_data_ptr<scalar_t>()};
        for_each_row(batch, state_size, [&](int64_t row) {
          const auto offset = row * state_size;
          backward_row<scalar_t>(
              state_size,
              {first.grad_h + offset,
               first.grad_cell + offset,
               first.new_cell + offset,
               first.gates + 3 * offset,
               first.d_gates ? first.d_gates + 3 * offset : nullptr,
               first.d_old_cell + offset});
        });
      });
  return linear_gates_backward(
      d_gates, d_old_cell, input, weights, old_h, output_mask);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("forward", TORCH_FN(forward_kernel));
  m.impl("_forward_with_gates", TORCH_FN(forward_kernel_impl<true>));
  m.impl("backward", TORCH_FN(backward_kernel));
}

} // namespace lltm
