#include "cpu/vectorize.h"
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

// Hidden units per task: some 10 us of work, several times the cost of waking a
// thread.
constexpr int64_t kGrainSize = 8192;

template <typename Rows>
void for_rows(int64_t batch, int64_t state_size, const Rows& rows) {
  const auto rows_per_task =
      std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, state_size));
  const auto run = vectorized<Rows>();
  at::parallel_for(0, batch, rows_per_task, [&](int64_t begin, int64_t end) {
    run(rows, begin, end);
  });
}

// gates holds the pre-activations, and takes the activated gates if
// write_gates.
template <typename scalar_t, bool write_gates>
struct ForwardRows {
  int64_t state_size;
  scalar_t* gates;
  const scalar_t* old_cell;
  scalar_t* new_h;
  scalar_t* new_cell;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      one_row(
          gates + row * 3 * state_size,
          old_cell + row * state_size,
          new_h + row * state_size,
          new_cell + row * state_size);
    }
  }

  C10_ALWAYS_INLINE void one_row(
      scalar_t* __restrict__ gates,
      const scalar_t* __restrict__ old_cell,
      scalar_t* __restrict__ new_h,
      scalar_t* __restrict__ new_cell) const {
    using opmath_t = at::opmath_type<scalar_t>;
    for (int64_t i = 0; i < state_size; ++i) {
      const auto out = cell_forward<opmath_t>(
          gates[i],
          gates[i + state_size],
          gates[i + 2 * state_size],
          old_cell[i]);
      new_h[i] = out.new_h;
      new_cell[i] = out.new_cell;
      if constexpr (write_gates) {
        gates[i] = out.input_gate;
        gates[i + state_size] = out.output_gate;
        gates[i + 2 * state_size] = out.candidate;
      }
    }
  }
};

// d_gates may be null: nobody needs it.
template <typename scalar_t>
struct BackwardRows {
  int64_t state_size;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  scalar_t* d_gates;
  scalar_t* d_old_cell;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      const auto unit = row * state_size;
      one_row(
          grad_h + unit,
          grad_cell + unit,
          new_cell + unit,
          gates + 3 * unit,
          d_gates == nullptr ? nullptr : d_gates + 3 * unit,
          d_old_cell + unit);
    }
  }

  C10_ALWAYS_INLINE void one_row(
      const scalar_t* __restrict__ grad_h,
      const scalar_t* __restrict__ grad_cell,
      const scalar_t* __restrict__ new_cell,
      const scalar_t* __restrict__ gates,
      scalar_t* __restrict__ d_gates,
      scalar_t* __restrict__ d_old_cell) const {
    using opmath_t = at::opmath_type<scalar_t>;
    for (int64_t i = 0; i < state_size; ++i) {
      const auto out = cell_backward<opmath_t>(
          grad_h[i],
          grad_cell[i],
          new_cell[i],
          gates[i],
          gates[i + state_size],
          gates[i + 2 * state_size]);
      d_old_cell[i] = out.d_old_cell;
      if (d_gates != nullptr) {
        d_gates[i] = out.d_input_gate;
        d_gates[i + state_size] = out.d_output_gate;
        d_gates[i + 2 * state_size] = out.d_candidate;
      }
    }
  }
};

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
        for_rows(
            batch,
            state_size,
            ForwardRows<scalar_t, write_gates>{
                state_size,
                gates.mutable_data_ptr<scalar_t>(),
                old_cell_->const_data_ptr<scalar_t>(),
                new_h.mutable_data_ptr<scalar_t>(),
                new_cell.mutable_data_ptr<scalar_t>()});
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
        for_rows(
            batch,
            state_size,
            BackwardRows<scalar_t>{
                state_size,
                grad_h_->const_data_ptr<scalar_t>(),
                grad_cell_->const_data_ptr<scalar_t>(),
                new_cell_->const_data_ptr<scalar_t>(),
                gates_->const_data_ptr<scalar_t>(),
                d_gates.defined() ? d_gates.mutable_data_ptr<scalar_t>()
                                  : nullptr,
                d_old_cell.mutable_data_ptr<scalar_t>()});
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
