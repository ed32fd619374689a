#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/matrix.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <c10/macros/Macros.h>

#include <cstdint>

// The gradients of the gates, which are computed before the products.
namespace lltm {

// A body for vectorized(): units [first_unit, end_unit) of some rows. The
// gradients that pass between steps are not rounded.
template <typename scalar_t, typename gemm_t>
struct GatesBackward {
  using opmath_t = at::opmath_type<scalar_t>;

  int64_t state_size;
  CellMath<opmath_t> math;
  int64_t first_unit;
  int64_t end_unit;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  Matrix<gemm_t> d_gates; // of the pre-activations
  // From the step after this one; d_cell then is that of the old cell state.
  const opmath_t* d_h;
  opmath_t* d_cell;

  // begin and end count rows.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    for (auto row = begin; row < end; ++row) {
      const auto at = row * state_size;
      one_row(
          grad_h + at,
          grad_cell + at,
          new_cell + at,
          gates + kGates * at,
          d_gates.row(row),
          d_h + at,
          d_cell + at);
    }
  }

 private:
  C10_ALWAYS_INLINE void one_row(
      const scalar_t* __restrict__ grad_h,
      const scalar_t* __restrict__ grad_cell,
      const scalar_t* __restrict__ new_cell,
      const scalar_t* __restrict__ gates,
      gemm_t* __restrict__ d_gates,
      const opmath_t* __restrict__ d_h,
      opmath_t* __restrict__ d_cell) const {
    const auto math = this->math; // no store changes it
    for (auto i = first_unit; i < end_unit; ++i) {
      const auto out = math.backward(
          load(grad_h[i]) + d_h[i],
          load(grad_cell[i]) + d_cell[i],
          lltm::tanh(load(new_cell[i])),
          load(gates[i]),
          load(gates[i + state_size]),
          load(gates[i + 2 * state_size]));
      store(out.d_input_gate, d_gates[i]);
      store(out.d_output_gate, d_gates[i + state_size]);
      store(out.d_candidate, d_gates[i + 2 * state_size]);
      d_cell[i] = out.d_old_cell;
    }
  }
};

} // namespace lltm
