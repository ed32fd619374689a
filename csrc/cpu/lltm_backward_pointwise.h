#pragma once

#include "cpu/choices.h"
#include "cpu/lltm_backward.h"
#include "cpu/lltm_gradients.h"
#include "cpu/primitives/convert.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/vectorize.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

// What precedes the products of the backward step: the gradients of the
// pre-activations, and those of bias and old_cell.
namespace lltm {

template <typename scalar_t, typename gemm_t>
struct BackwardBlock {
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr int64_t kBlock = kUnitsOfABackwardBlock;

  const BackwardPointers<scalar_t>& pointers;
  const GateGradients<gemm_t>& d_gates;

  // Rows of the batch, at most kVector.
  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    alignas(64) opmath_t block[kVector * 3 * kBlock];
    const auto state_size = pointers.state_size;
    const auto rows = end - begin;
    for (int64_t unit = 0; unit < state_size; unit += kBlock) {
      const auto units = std::min(kBlock, state_size - unit);
      for (int64_t row = 0; row < rows; ++row) {
        compute_row(begin + row, unit, units, block + row * 3 * kBlock);
      }
      for (int64_t gate = 0; gate < 3; ++gate) {
        copy(
            block + gate * kBlock,
            begin,
            rows,
            gate * state_size + unit,
            units);
      }
    }
  }

  C10_ALWAYS_INLINE void copy(
      const opmath_t* block,
      int64_t first_row,
      int64_t rows,
      int64_t first_unit,
      int64_t units) const {
    if (d_gates.rows != nullptr) {
      ConvertRows<opmath_t, gemm_t>{
          block,
          3 * kBlock,
          units,
          d_gates.rows + first_row * d_gates.ld_rows + first_unit,
          d_gates.ld_rows}(0, rows);
    }
    if (d_gates.columns != nullptr) {
      transpose(
          block,
          3 * kBlock,
          rows,
          units,
          d_gates.columns + first_unit * d_gates.ld_columns + first_row,
          d_gates.ld_columns);
    }
  }

  C10_ALWAYS_INLINE void
  compute_row(int64_t row, int64_t unit, int64_t units, opmath_t* block) const {
    if (pointers.d_old_cell == nullptr) {
      compute_row<false>(row, unit, units, block);
    } else {
      compute_row<true>(row, unit, units, block);
    }
  }

  template <bool write_d_old_cell>
  C10_ALWAYS_INLINE void
  compute_row(int64_t row, int64_t unit, int64_t units, opmath_t* block) const {
    const auto& a = pointers;
    const auto at = row * a.state_size + unit;
    compute<write_d_old_cell>(
        a.grad_h + at,
        a.grad_cell + at,
        a.new_cell + at,
        a.gates + row * 3 * a.state_size + unit,
        a.state_size,
        units,
        block,
        write_d_old_cell ? a.d_old_cell + at : nullptr);
  }

  template <bool write_d_old_cell>
  C10_ALWAYS_INLINE void compute(
      const scalar_t* __restrict__ grad_h,
      const scalar_t* __restrict__ grad_cell,
      const scalar_t* __restrict__ new_cell,
      const scalar_t* __restrict__ gates,
      int64_t state_size,
      int64_t units,
      opmath_t* __restrict__ block,
      scalar_t* __restrict__ d_old_cell) const {
    for (int64_t i = 0; i < units; ++i) {
      const auto out = cell_backward<opmath_t>(
          load(grad_h[i]),
          load(grad_cell[i]),
          load(new_cell[i]),
          load(gates[i]),
          load(gates[i + state_size]),
          load(gates[i + 2 * state_size]));
      block[i] = out.d_input_gate;
      block[i + kBlock] = out.d_output_gate;
      block[i + 2 * kBlock] = out.d_candidate;
      if constexpr (write_d_old_cell) {
        store(out.d_old_cell, d_old_cell[i]);
      }
    }
  }
};

// Everything pointwise: d_old_cell, and what d_gates wants.
template <typename scalar_t, typename gemm_t>
void backward_pointwise(
    const BackwardPointers<scalar_t>& a,
    const GateGradients<gemm_t>& d_gates) {
  const auto run = vectorized<BackwardBlock<scalar_t, gemm_t>>();
  const auto blocks = at::divup(a.batch, kVector);
  at::parallel_for(
      0,
      blocks,
      grain_size(kVector * a.state_size * kNanosecondsOfGatesBackward),
      [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
          run({a, d_gates},
              block * kVector,
              std::min(a.batch, (block + 1) * kVector));
        }
      });
}

} // namespace lltm
