#pragma once

#include "cpu/convert.h"
#include "cpu/gemm.h"
#include "cpu/lanes.h"
#include "cpu/pack.h"
#include "cpu/scratch.h"
#include "cpu/vectorize.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

// The backward step on raw pointers to contiguous memory.
namespace lltm {

// Gradients that are null are not wanted.
template <typename scalar_t>
struct BackwardArguments {
  int64_t batch;
  int64_t input_features;
  int64_t state_size;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* old_h;
  scalar_t* d_input;
  scalar_t* d_weights;
  scalar_t* d_bias;
  scalar_t* d_old_h;
  scalar_t* d_old_cell;

  int64_t features() const {
    return state_size + input_features;
  }
};

// The gradients of the pre-activations as the products need them. Either may be
// null: rows [batch, ld_rows] for those with weights; columns, the transpose,
// for those with input and old_h, in blocks [units, ld] of kMaxK rows of the
// batch. oneDNN generates a kernel for each leading dimension and keeps it, so
// none may be as long as the batch.
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
    return std::min(kMaxK, batch - first_row);
  }
};

template <typename scalar_t, typename gemm_t>
struct BackwardBlock {
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr int64_t kBlock = 64;

  const BackwardArguments<scalar_t>& arguments;
  const GateGradients<gemm_t>& d_gates;

  // Rows of the batch, at most kVector.
  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    alignas(64) opmath_t block[kVector * 3 * kBlock];
    const auto state_size = arguments.state_size;
    const auto rows = end - begin;
    for (int64_t unit = 0; unit < state_size; unit += kBlock) {
      const auto units = std::min(kBlock, state_size - unit);
      for (int64_t row = 0; row < rows; ++row) {
        one_row(begin + row, unit, units, block + row * 3 * kBlock);
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
      const auto first = first_row / kMaxK * kMaxK;
      const auto ld = d_gates.ld(first);
      auto* to = d_gates.block(first) + first_unit * ld + first_row - first;
      transpose(block, 3 * kBlock, rows, units, to, ld);
    }
  }

  C10_ALWAYS_INLINE void
  one_row(int64_t row, int64_t unit, int64_t units, opmath_t* block) const {
    if (arguments.d_old_cell == nullptr) {
      one_row<false>(row, unit, units, block);
    } else {
      one_row<true>(row, unit, units, block);
    }
  }

  template <bool write_d_old_cell>
  C10_ALWAYS_INLINE void
  one_row(int64_t row, int64_t unit, int64_t units, opmath_t* block) const {
    const auto& a = arguments;
    const auto at = row * a.state_size + unit;
    one_row<write_d_old_cell>(
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
  C10_ALWAYS_INLINE void one_row(
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
    const BackwardArguments<scalar_t>& a,
    const GateGradients<gemm_t>& d_gates) {
  const auto run = vectorized<BackwardBlock<scalar_t, gemm_t>>();
  const auto blocks = (a.batch + kVector - 1) / kVector;
  at::parallel_for(
      0,
      blocks,
      grain_size(kVector * a.state_size * 2),
      [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
          run({a, d_gates},
              block * kVector,
              std::min(a.batch, (block + 1) * kVector));
        }
      });
}

template <typename scalar_t, typename gemm_t>
struct SumColumns {
  using opmath_t = at::opmath_type<scalar_t>;

  const GateGradients<gemm_t>& d_gates;
  int64_t batch;
  scalar_t* d_bias;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t unit = begin; unit < end; ++unit) {
      opmath_t total = 0;
      for (int64_t row = 0; row < batch; row += kMaxK) {
        total +=
            sum(d_gates.block(row) + unit * d_gates.ld(row),
                std::min(kMaxK, batch - row));
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
    typename Lanes<opmath_t, kVector>::type lanes;
    std::memcpy(&lanes, sums, sizeof(lanes));
    auto total = add_lanes<opmath_t, kVector>(lanes);
    for (; i < size; ++i) {
      total += load(values[i]);
    }
    return total;
  }
};

// A block of C in scalar_t by way of opmath_t: in place if they are one.
template <typename scalar_t>
class Products {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  Products(int64_t rows, int64_t columns)
      : columns_(columns), scratch_(kInPlace ? 0 : rows * columns) {}

  opmath_t* of(scalar_t* C) {
    if constexpr (kInPlace) {
      return C;
    } else {
      return scratch_.data();
    }
  }

  int64_t ld(int64_t ldc) const {
    return kInPlace ? ldc : columns_;
  }

  void finish(int64_t rows, int64_t columns, scalar_t* C, int64_t ldc) {
    if constexpr (!kInPlace) {
      vectorized<ConvertRows<opmath_t, scalar_t>>()(
          {scratch_.data(), columns_, columns, C, ldc}, 0, rows);
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<scalar_t, opmath_t>;
  int64_t columns_;
  Scratch<opmath_t> scratch_;
};

// d_weights = d_gates.T @ [old_h, input], the latter packed into panels of its
// columns. Few rows of the batch make many results of few products: then one
// panel, so that whole rows of d_weights are written one after the other.
template <typename scalar_t, typename gemm_t>
class BackwardWeights {
 public:
  BackwardWeights(
      const BackwardArguments<scalar_t>& arguments,
      const GateGradients<gemm_t>& d_gates)
      : a_(arguments),
        d_gates_(d_gates),
        width_(is_narrow() ? round_up(features_, kVector) : 64),
        // Large, so that d_gates are read from L2 for all panels.
        block_rows_(is_narrow() ? 16 : 384),
        panels_((features_ + width_ - 1) / width_),
        packed_(panels_ * width_ * batch_) {}

  void run() {
    pack();
    const auto row_blocks = (rows_ + block_rows_ - 1) / block_rows_;
    const auto nanoseconds = block_rows_ * width_ *
        std::max<int64_t>(2 * batch_, 20) / kFlopPerNanosecond;
    at::parallel_for(
        0,
        row_blocks * panels_,
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          Products<scalar_t> products(block_rows_, width_);
          for (int64_t task = begin; task < end; ++task) {
            one_block(
                task / panels_ * block_rows_,
                task % panels_ * width_,
                products);
          }
          release_gemm<gemm_t>();
        });
  }

 private:
  static constexpr auto kPairs = kPair<gemm_t>;

  bool is_narrow() const {
    return a_.batch < kVector;
  }

  void pack() {
    at::parallel_for(
        0,
        panels_,
        grain_size(batch_ * width_ / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t panel = begin; panel < end; ++panel) {
            pack(panel, a_.old_h, 0, a_.state_size);
            pack(panel, a_.input, a_.state_size, a_.input_features);
          }
        });
  }

  // What lies in the panel of columns [first, first + size).
  void pack(int64_t panel, const scalar_t* from, int64_t first, int64_t size) {
    const auto begin = std::max(panel * width_, first);
    const auto end = std::min((panel + 1) * width_, first + size);
    if (begin < end) {
      auto* to = packed_.data() + panel * width_ * batch_;
      vectorized<PackRows<scalar_t, gemm_t>>()(
          {from + begin - first,
           size,
           a_.batch,
           end - begin,
           to + (begin - panel * width_) * kPairs,
           width_},
          0,
          batch_ / kPairs);
    }
  }

  void one_block(int64_t row, int64_t column, Products<scalar_t>& products)
      const {
    const auto size_m = std::min(block_rows_, rows_ - row);
    const auto size_n = std::min(width_, features_ - column);
    auto* C = a_.d_weights + row * features_ + column;
    for (int64_t k = 0; k < batch_; k += kMaxK) {
      gemm<gemm_t>(
          size_m,
          size_n,
          std::min(kMaxK, batch_ - k),
          d_gates_.block(k) + row * d_gates_.ld(k),
          d_gates_.ld(k),
          packed_.data() + column * batch_ + k * width_,
          width_,
          products.of(C),
          products.ld(features_),
          k > 0);
    }
    products.finish(size_m, size_n, C, features_);
  }

  const BackwardArguments<scalar_t>& a_;
  const GateGradients<gemm_t>& d_gates_;
  const int64_t features_ = a_.features();
  const int64_t rows_ = d_gates_.units;
  const int64_t batch_ = d_gates_.batch;
  const int64_t width_;
  const int64_t block_rows_;
  const int64_t panels_;
  const Scratch<gemm_t> packed_;
};

// Rows of C for a call, of those that remain: few sizes, since oneDNN generates
// a kernel for each and keeps it.
inline int64_t rows_of_block(int64_t remaining) {
  constexpr int64_t kRows = 128;
  return remaining < kVector ? remaining
                             : std::min(kRows, remaining / kVector * kVector);
}

// d_X = d_gates @ columns of weights, [batch, columns].
template <typename scalar_t, typename gemm_t>
void backward_columns(
    const BackwardArguments<scalar_t>& a,
    const GateGradients<gemm_t>& d_gates,
    int64_t first_column,
    int64_t columns,
    scalar_t* d_X) {
  constexpr bool packs =
      !std::is_same_v<scalar_t, gemm_t> || kPair<gemm_t> == 2;
  // Unpacked, a row of B of 64 columns would fall on the same sets of the L1
  // cache as the next where features is a power of two.
  constexpr int64_t kColumns = 48;
  const auto features = a.features();
  const auto size_k = d_gates.ld_rows;
  const auto run = vectorized<PackRows<scalar_t, gemm_t>>();
  at::parallel_for(
      0,
      (columns + kColumns - 1) / kColumns,
      grain_size(2 * a.batch * kColumns * size_k / kFlopPerNanosecond),
      [&](int64_t begin, int64_t end) {
        Products<scalar_t> products(a.batch, kColumns);
        const Scratch<gemm_t> packed(packs ? kMaxK * kColumns : 0);
        for (int64_t task = begin; task < end; ++task) {
          const auto column = task * kColumns;
          const auto size_n = std::min(kColumns, columns - column);
          auto* C = d_X + column;
          const auto ld = products.ld(columns);
          for (int64_t k = 0; k < size_k; k += kMaxK) {
            const auto block_k = std::min(kMaxK, size_k - k);
            const auto* from = a.weights + k * features + first_column + column;
            const gemm_t* B;
            if constexpr (packs) {
              run({from,
                   features,
                   3 * a.state_size - k,
                   size_n,
                   packed.data(),
                   kColumns},
                  0,
                  block_k / kPair<gemm_t>);
              B = packed.data();
            } else {
              B = from;
            }
            for (int64_t row = 0, rows = 0; row < a.batch; row += rows) {
              rows = rows_of_block(a.batch - row);
              gemm<gemm_t>(
                  rows,
                  size_n,
                  block_k,
                  d_gates.rows + row * size_k + k,
                  size_k,
                  B,
                  packs ? kColumns : features,
                  products.of(C) + row * ld,
                  ld,
                  k > 0);
            }
          }
          products.finish(a.batch, size_n, C, columns);
        }
        release_gemm<gemm_t>();
      });
}

template <typename scalar_t, typename gemm_t>
void backward_gemm(const BackwardArguments<scalar_t>& a) {
  constexpr auto pair = kPair<gemm_t>;
  const auto rows = 3 * a.state_size;
  const bool wants_rows = a.d_input != nullptr || a.d_old_h != nullptr;
  const bool wants_columns = a.d_weights != nullptr || a.d_bias != nullptr;
  const auto ld_rows = round_up(rows, pair);
  // Few sizes of K, each a kernel.
  const auto batch = round_up(a.batch, a.batch < kVector ? pair : 8);
  const Scratch<gemm_t> row_scratch(wants_rows ? a.batch * ld_rows : 0);
  const Scratch<gemm_t> column_scratch(wants_columns ? rows * batch : 0);
  const GateGradients<gemm_t> d_gates{
      wants_rows ? row_scratch.data() : nullptr,
      ld_rows,
      wants_columns ? column_scratch.data() : nullptr,
      rows,
      batch};
  for (int64_t row = 0; wants_rows && row < a.batch; ++row) {
    std::fill_n(d_gates.rows + row * ld_rows + rows, ld_rows - rows, gemm_t(0));
  }
  const auto last = (a.batch - 1) / kMaxK * kMaxK;
  for (int64_t unit = 0; wants_columns && unit < rows; ++unit) {
    std::fill_n(
        d_gates.block(last) + unit * d_gates.ld(last) + a.batch - last,
        batch - a.batch,
        gemm_t(0));
  }
  backward_pointwise(a, d_gates);
  if (a.d_bias != nullptr) {
    vectorized<SumColumns<scalar_t, gemm_t>>()(
        {d_gates, a.batch, a.d_bias}, 0, rows);
  }
  if (a.d_weights != nullptr) {
    BackwardWeights<scalar_t, gemm_t>(a, d_gates).run();
  }
  if (a.d_old_h != nullptr) {
    backward_columns(a, d_gates, 0, a.state_size, a.d_old_h);
  }
  if (a.d_input != nullptr) {
    backward_columns(a, d_gates, a.state_size, a.input_features, a.d_input);
  }
}

} // namespace lltm
