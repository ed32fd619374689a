#include "cpu/lltm_empty_gradients.h"
#include "cpu/lltm_gates.h"
#include "cpu/lltm_gradients.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/profiled_path.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"
#include "cpu/primitives/work.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

// lltm::backward on the CPU: the gradients of the gates, then the products of
// lltm_gradients.h.
namespace lltm {

namespace {

// On raw pointers to contiguous memory.
template <typename scalar_t>
struct BackwardStep {
  CellSizes sizes;
  GradientPointers<scalar_t> gradients;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* old_h;
};

template <typename scalar_t, typename gemm_t>
void write_d_gates(
    const BackwardStep<scalar_t>& a,
    const GateGradients<gemm_t>& d_gates) {
  at::parallel_for(
      0,
      a.sizes.batch,
      grain_size(a.sizes.state_size * kNanosecondsOfGatesBackward),
      [&](int64_t begin, int64_t end) {
        vectorized<GatesBackward<scalar_t, gemm_t, scalar_t>>(
            {.state_size = a.sizes.state_size,
             .first_unit = 0,
             .end_unit = a.sizes.state_size,
             .grad_h = a.grad_h,
             .grad_cell = a.grad_cell,
             .new_cell = a.new_cell,
             .gates = a.gates,
             .d_gates = d_gates.rows,
             .d_h = nullptr,
             .d_cell = a.gradients.d_old_cell},
            begin,
            end);
      });
}

template <typename scalar_t, typename gemm_t>
void write_gradients(const BackwardStep<scalar_t>& a) {
  const auto gate_units = 3 * a.sizes.state_size;
  const bool wants_columns =
      a.gradients.d_weights != nullptr || a.gradients.d_bias != nullptr;
  const auto ld_rows = leading_dimension<gemm_t>(gate_units);
  const auto ld_columns = leading_dimension<gemm_t>(a.sizes.batch);
  const Scratch<gemm_t> rows(a.sizes.batch * ld_rows);
  const Scratch<gemm_t> columns(wants_columns ? gate_units * ld_columns : 0);
  const GateGradients<gemm_t> d_gates{
      .batch = a.sizes.batch,
      .gate_units = gate_units,
      .rows = {rows.data(), ld_rows},
      .columns = {columns.data(), ld_columns}};
  d_gates.zero_padding();
  write_d_gates(a, d_gates);
  if (wants_columns) {
    d_gates.transpose();
  }
  if (a.gradients.d_bias != nullptr) {
    bias_gradient(d_gates, a.gradients.d_bias, false);
  }
  if (a.gradients.d_weights != nullptr) {
    weights_gradient(
        a.sizes, d_gates, a.old_h, a.input, a.gradients.d_weights, false);
  }
  if (a.gradients.d_old_h != nullptr) {
    rows_gradient(
        a.sizes, d_gates, a.weights, a.sizes.state_size, a.gradients.d_old_h);
  }
  if (a.gradients.d_input != nullptr) {
    const auto* weights = a.weights + a.sizes.state_size;
    rows_gradient(
        a.sizes, d_gates, weights, a.sizes.input_features, a.gradients.d_input);
  }
}

template <typename scalar_t>
void backward_step(const BackwardStep<scalar_t>& step) {
  if constexpr (kPair<scalar_t> == 2) {
    if (has_bfloat16_gemm()) {
      const ProfiledPath path("lltm::backward_gemm_bfloat16");
      return write_gradients<scalar_t, scalar_t>(step);
    }
  }
  const ProfiledPath path("lltm::backward_gemm");
  write_gradients<scalar_t, at::opmath_type<scalar_t>>(step);
}

BackwardResult backward_kernel(const BackwardArguments& a) {
  check_arguments(a);
  const auto result =
      empty_gradients(a.new_cell, a.input, a.weights, a.old_h, a.output_mask);
  if (a.new_cell.numel() == 0) {
    return result;
  }
  const auto grad_h = a.grad_h.expect_contiguous();
  const auto grad_cell = a.grad_cell.expect_contiguous();
  const auto new_cell = a.new_cell.expect_contiguous();
  const auto gates = a.gates.expect_contiguous();
  const auto input = a.input.expect_contiguous();
  // Autograd passes weights without values if they are not needed.
  const bool needs_weights = a.output_mask[0] || a.output_mask[3];
  const auto weights = needs_weights
      ? a.weights.expect_contiguous()
      : c10::MaybeOwned<at::Tensor>::borrowed(a.weights);
  const auto old_h = a.old_h.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_backward_cpu",
      [&] {
        backward_step<scalar_t>({
            .sizes = {a.input.size(0), a.input.size(1), a.old_h.size(1)},
            .gradients = pointers_to<scalar_t>(result),
            .grad_h = grad_h->const_data_ptr<scalar_t>(),
            .grad_cell = grad_cell->const_data_ptr<scalar_t>(),
            .new_cell = new_cell->const_data_ptr<scalar_t>(),
            .gates = gates->const_data_ptr<scalar_t>(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .old_h = old_h->const_data_ptr<scalar_t>(),
        });
      });
  return result;
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("backward", as_kernel<backward_kernel>());
}

} // namespace lltm
