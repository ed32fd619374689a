#pragma once

#include "cpu/lltm_cell.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/product_on_threads.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

// The gradients of weights, bias, input and h, computed from those of the
// pre-activations of some rows.
namespace lltm {

// A gradient that adds up over chunks, in opmath_t. It has memory of its own if
// there are several and the result has another type.
template <typename scalar_t>
class SumOfChunks {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  // result: null if it is not wanted.
  SumOfChunks(scalar_t* result, int64_t size, bool has_chunks)
      : result_(result),
        size_(size),
        sum_(kInPlace || result == nullptr || !has_chunks ? 0 : size) {}

  // Calls f(where to add).
  template <typename F>
  void add(const F& f) {
    if (sum_.data() != nullptr) {
      f(sum_.data());
    } else if (result_ != nullptr) {
      f(result_);
    }
  }

  void write() {
    if (sum_.data() != nullptr) {
      convert(sum_.data(), result_, size_);
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<scalar_t, opmath_t>;

  scalar_t* const result_;
  const int64_t size_;
  Scratch<opmath_t> sum_;
};

// The distance between rows of so many elements: an odd number of cache lines,
// because rows that lie a multiple of many lines apart fall on the same sets of
// a cache. Pairs of rows lie twice as far apart.
template <typename T>
int64_t leading_dimension(int64_t size) {
  constexpr int64_t line = 64 / sizeof(T);
  return (at::divup(size, line) | 1) * line;
}

// d_preactivations in the two layouts that products need: rows [batch,
// gate_units] for products with weights, and transposed for products with input
// and h, if that is wanted.
template <typename gemm_t>
class PreactivationGradients {
 public:
  PreactivationGradients(
      int64_t most_rows,
      int64_t gate_units,
      bool wants_transposed)
      : gate_units_(gate_units),
        ld_rows_(leading_dimension<gemm_t>(padded(gate_units))),
        ld_transposed_(leading_dimension<gemm_t>(padded(most_rows))),
        rows_(most_rows * ld_rows_),
        transposed_(wants_transposed ? gate_units * ld_transposed_ : 0) {
    zero(rows(), most_rows, gate_units);
  }

  Matrix<gemm_t> rows() {
    return {rows_.data(), ld_rows_};
  }

  Matrix<gemm_t> transposed() {
    return {transposed_.data(), ld_transposed_};
  }

  // Transposes so many rows.
  void transpose(int64_t batch) {
    constexpr int64_t at_once = 16;
    at::parallel_for(
        0,
        at::divup(batch, at_once),
        grain_size(at_once * gate_units_ / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          const auto first = begin * at_once;
          const auto size = std::min(end * at_once, batch) - first;
          run_with_best_isa(
              Transpose<gemm_t, gemm_t>{
                  .from = rows().part(first, 0),
                  .rows = size,
                  .to = transposed().part(0, first)},
              0,
              gate_units_);
        });
    zero(transposed(), gate_units_, batch);
  }

 private:
  static int64_t padded(int64_t terms) {
    return padded_terms<gemm_t>(terms);
  }

  static void zero(Matrix<gemm_t> to, int64_t rows, int64_t size) {
    for (int64_t row = 0; padded(size) > size && row < rows; ++row) {
      std::fill(to.row(row) + size, to.row(row) + padded(size), gemm_t(0));
    }
  }

  const int64_t gate_units_;
  const int64_t ld_rows_;
  const int64_t ld_transposed_;
  Scratch<gemm_t> rows_;
  Scratch<gemm_t> transposed_;
};

// d_weights = or += d_preactivations.T @ [old_h, input]
template <typename scalar_t, typename gemm_t, typename out_t>
void weights_gradient(
    const CellSizes& sizes,
    Matrix<const gemm_t> d_preactivations,
    const scalar_t* old_h,
    const scalar_t* input,
    out_t* d_weights,
    bool accumulate) {
  const auto product = [&](const scalar_t* B, int64_t N, out_t* C) {
    ProductOnThreads<scalar_t, gemm_t, out_t>({.M = sizes.gate_units(),
                                               .N = N,
                                               .K = sizes.batch,
                                               .A = d_preactivations,
                                               .B = {B, N},
                                               .C = {C, sizes.features()},
                                               .accumulate = accumulate})
        .run();
  };
  product(old_h, sizes.state_size, d_weights);
  product(input, sizes.input_features, d_weights + sizes.state_size);
}

// result, the gradient of old_h or of input, = d_preactivations @ the columns
// of weights that it is multiplied by.
template <typename scalar_t, typename gemm_t>
void operand_gradient(
    const CellSizes& sizes,
    Matrix<const gemm_t> d_preactivations,
    const scalar_t* columns_of_weights,
    int64_t columns,
    scalar_t* result) {
  ProductOnThreads<scalar_t, gemm_t, scalar_t>(
      {.M = sizes.batch,
       .N = columns,
       .K = sizes.gate_units(),
       .A = d_preactivations,
       .B = {columns_of_weights, sizes.features()},
       .C = {result, columns},
       .accumulate = false})
      .run();
}

// d_bias = or += sums over the rows. Sums of 64 rows are added up in double:
// one float chain over a large batch has ten times the error of PyTorch's sum.
template <typename out_t, typename gemm_t>
struct BiasGradient {
  Matrix<const gemm_t> d_preactivations;
  int64_t batch;
  out_t* d_bias;
  bool accumulate;

  // begin and end count gate units.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    using opmath_t = at::opmath_type<out_t>;
    constexpr int64_t units = 128, rows = 64;
    for (auto unit = begin; unit < end; unit += units) {
      const auto size = std::min(units, end - unit);
      double totals[units] = {};
      for (int64_t first = 0; first < batch; first += rows) {
        opmath_t sums[units] = {};
        for (auto row = first; row < std::min(first + rows, batch); ++row) {
          const auto* values = d_preactivations.row(row) + unit;
          for (int64_t i = 0; i < size; ++i) {
            sums[i] += to_opmath(values[i]);
          }
        }
        for (int64_t i = 0; i < size; ++i) {
          totals[i] += sums[i];
        }
      }
      for (int64_t i = 0; i < size; ++i) {
        auto& to = d_bias[unit + i];
        from_opmath(
            opmath_t(accumulate ? to_opmath(to) + totals[i] : totals[i]), to);
      }
    }
  }
};

template <typename out_t, typename gemm_t>
void bias_gradient(
    const CellSizes& sizes,
    Matrix<const gemm_t> d_preactivations,
    out_t* d_bias,
    bool accumulate) {
  at::parallel_for(
      0,
      sizes.gate_units(),
      grain_size(sizes.batch / kPackedPerNanosecond),
      [&](int64_t begin, int64_t end) {
        run_with_best_isa(
            BiasGradient<out_t, gemm_t>{
                d_preactivations, sizes.batch, d_bias, accumulate},
            begin,
            end);
      });
}

} // namespace lltm
