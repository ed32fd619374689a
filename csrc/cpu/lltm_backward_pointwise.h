#pragma once

#include "cpu/choices.h"
#include "cpu/lltm_backward.h"
#include "cpu/primitives/convert.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

// What precedes the products of the backward step: the gradients of the
// pre-activations, and those of bias and old_cell.
namespace lltm {

// The gradients of the pre-activations, in the two layouts that products need.
// rows [batch, ld_rows] are for products with weights. columns, the transpose,
// are for products with input and old_h, in blocks [units, ld] of kMaxK rows of
// the batch. Either may be null. oneDNN generates a kernel for each leading
// dimension and keeps it, so the leading dimension must not grow with the
// batch.
template <typename gemm_t>
struct GateGradients {
  gemm_t* rows;
  int64_t ld_rows;
  gemm_t* columns;
  int64_t units; // 3 * state_size
  int64_t batch; // padded

  gemm_t* block(int64_t first_row) const {
    return columns + first_row * units;
  }

  int64_t ld(int64_t first_row) const {
    return std::min(kMaxK<gemm_t>, batch - first_row);
  }

  // What lies beyond the units of rows, and beyond the batch of columns.
  void zero_padding(int64_t size) const {
    for (int64_t row = 0; rows != nullptr && row < size; ++row) {
      std::fill_n(rows + row * ld_rows + units, ld_rows - units, gemm_t(0));
    }
    const auto last = (size - 1) / kMaxK<gemm_t> * kMaxK<gemm_t>;
    for (int64_t unit = 0; columns != nullptr && unit < units; ++unit) {
      auto* end = block(last) + unit * ld(last) + size - last;
      std::fill_n(end, batch - size, gemm_t(0));
    }
  }
};

// The batch of GateGradients: few sizes of K, each a kernel of oneDNN's.
template <typename gemm_t>
int64_t padded_batch(int64_t batch) {
  return batch < kVector ? round_up(batch, kPair<gemm_t>)
                         : padded_terms<gemm_t>(round_up(batch, 8));
}

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
      const auto first = first_row / kMaxK<gemm_t> * kMaxK<gemm_t>;
      const auto ld = d_gates.ld(first);
      auto* to = d_gates.block(first) + first_unit * ld + first_row - first;
      transpose(block, 3 * kBlock, rows, units, to, ld);
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

// Adds to d_bias if accumulate.
template <typename out_t, typename gemm_t>
struct SumColumns {
  using opmath_t = at::opmath_type<out_t>;

  const GateGradients<gemm_t>& d_gates;
  int64_t batch;
  out_t* d_bias;
  bool accumulate;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t unit = begin; unit < end; ++unit) {
      opmath_t total = accumulate ? load(d_bias[unit]) : opmath_t(0);
      for (int64_t row = 0; row < batch; row += kMaxK<gemm_t>) {
        total +=
            sum(d_gates.block(row) + unit * d_gates.ld(row),
                std::min(kMaxK<gemm_t>, batch - row));
      }
      store(total, d_bias[unit]);
    }
  }

  C10_ALWAYS_INLINE opmath_t
  sum(const gemm_t* __restrict__ values, int64_t size) const {
    opmath_t sums[kVector] = {};
    int64_t i = 0;
    for (; i + kVector <= size; i += kVector) {
      for (int64_t lane = 0; lane < kVector; ++lane) {
        sums[lane] += load(values[i + lane]);
      }
    }
    typename Lanes<opmath_t, sizeof(sums)>::type lanes;
    std::memcpy(&lanes, sums, sizeof(lanes));
    auto total = add_lanes<opmath_t, sizeof(sums)>(lanes);
    for (; i < size; ++i) {
      total += load(values[i]);
    }
    return total;
  }
};

template <typename out_t, typename gemm_t>
void sum_columns(
    const GateGradients<gemm_t>& d_gates,
    int64_t batch,
    out_t* d_bias,
    bool accumulate) {
  at::parallel_for(
      0,
      d_gates.units,
      grain_size(batch / kPackedPerNanosecond),
      [&](int64_t begin, int64_t end) {
        vectorized<SumColumns<out_t, gemm_t>>()(
            {d_gates, batch, d_bias, accumulate}, begin, end);
      });
}

} // namespace lltm
