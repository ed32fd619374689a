#pragma once

#include "cpu/cell_sizes.h"
#include "cpu/primitives/convert.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/product_on_threads.h"
#include "cpu/primitives/vectorize.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

// The gradients of weights, bias, input and h, computed from d_gates, the
// gradients of the pre-activations of some rows.
namespace lltm {

// Elements of a block of d_weights. Measured on Zen 5.
constexpr int64_t kWeightsBlock = 24576;
// Columns of a block, at most. Wide blocks are written in long runs, so they
// are for small batches, in which each result is a sum of few terms. At
// 64x1024x1024 backward takes 12 % less time on the Xeon than with 64 columns.
// In bfloat16 256 columns are enough: at 8x1024x1024 more take longer. The
// width is a power of two, so that few widths occur as the batch changes.
template <typename gemm_t>
int64_t weights_panel(int64_t batch) {
  const int64_t elements = kPair<gemm_t> == 2 ? 16384 : 32768;
  const int64_t most = kPair<gemm_t> == 2 ? 256 : elements;
  int64_t width = 64;
  while (2 * width <= most && 2 * width * batch <= elements) {
    width *= 2;
  }
  return width;
}

// A task computes so many rows of d_input or d_old_h, to limit its scratch
// memory if types are converted.
constexpr int64_t kRowsOfATask = 1024;

// The distance between rows of so many terms. It is one of a few numbers, like
// terms_of(), and none that puts all rows on the same sets of a cache.
template <typename gemm_t>
int64_t leading_dimension(int64_t size) {
  const auto ld = size > kMaxK<gemm_t> ? round_up(size, kMaxK<gemm_t>)
                                       : terms_of<gemm_t>(size);
  return kPair<gemm_t> == 1 && ld % 64 == 0 ? ld + 16 : ld;
}

// d_gates in the two layouts that products need: rows [batch, gate_units] for
// products with weights, and columns, their transpose, for products with input
// and h. The data of columns may be null.
template <typename gemm_t>
struct GateGradients {
  int64_t batch;
  int64_t gate_units; // 3 * state_size
  Matrix<gemm_t> rows;
  Matrix<gemm_t> columns;

  void zero_padding() const {
    zero_padding(rows, batch, gate_units);
    if (columns.data != nullptr) {
      zero_padding(columns, gate_units, batch);
    }
  }

  // Columns from rows.
  void transpose() const {
    at::parallel_for(
        0,
        at::divup(batch, kVector),
        grain_size(kVector * gate_units / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          const auto first = begin * kVector;
          const auto size = std::min(end * kVector, batch) - first;
          vectorized<Transpose<gemm_t, gemm_t>>(
              {.from = rows.part(first, 0),
               .columns = size,
               .padded = size,
               .to = columns.part(0, first)},
              0,
              gate_units);
        });
  }

 private:
  static void zero_padding(Matrix<gemm_t> to, int64_t rows, int64_t size) {
    const auto padded = terms_of<gemm_t>(size);
    for (int64_t row = 0; padded > size && row < rows; ++row) {
      std::fill(to.row(row) + size, to.row(row) + padded, gemm_t(0));
    }
  }
};

// One thread takes whole panels of the tile, of 48 columns or a part of that.
// Several threads get equal numbers of columns.
inline int64_t columns_of_a_block(int64_t size) {
  constexpr int64_t most = 768;
  constexpr int64_t panel = 48;
  return at::get_num_threads() > 1
      ? size_of_a_block(size, most)
      : round_up(at::divup(size, at::divup(size, most)), panel);
}

template <typename gemm_t>
Blocks blocks_of_weights(int64_t M, int64_t N, int64_t K) {
  if (kPair<gemm_t> == 2 || (K >= 32 && is_onednn_faster<gemm_t>())) {
    const auto most = weights_panel<gemm_t>(K);
    const auto columns = round_up(at::divup(N, at::divup(N, most)), kVector);
    const auto rows = at::divup(M, at::divup(M, kWeightsBlock / columns));
    return {
        .method = Method::kOneDNNInOneCall,
        .rows = rows,
        .columns = columns,
        .terms = kMaxK<gemm_t>};
  }
  if (K <= kFewTerms) {
    return {
        .method = Method::kTile,
        .rows = size_of_a_block(M, 64),
        .columns = N,
        .terms = K};
  }
  return {
      .method = Method::kTile,
      .rows = size_of_a_block(M, 384),
      .columns = columns_of_a_block(N),
      .terms = K};
}

// M counts rows of the batch, N columns of weights, and K gate units. The
// blocks are the fastest of those that were measured.
template <typename scalar_t, typename gemm_t>
Blocks blocks_of_rows(int64_t M, int64_t N, int64_t K) {
  const auto rows = std::min(M, kRowsOfATask);
  if constexpr (kPair<gemm_t> == 2) {
    const auto columns = size_of_a_block(N, M < 128 ? 1024 : 512);
    return {
        .method = Method::kOneDNN,
        .rows = rows,
        .columns = round_up(columns, kVector),
        .terms = M < 128 ? 128 : 512};
  }
  if (M >= 128 && is_onednn_faster<gemm_t>()) {
    return {
        .method = Method::kOneDNN,
        .rows = rows,
        .columns = size_of_a_block(N, 128),
        .terms = 512};
  }
  if (sizeof(scalar_t) == 2) { // converted
    const auto columns = size_of_a_block(N, M < 128 ? 1024 : 128);
    return {
        .method = Method::kTile,
        .rows = rows,
        .columns = columns,
        .terms = M < 128 ? 128 : 512};
  }
  if (M <= kFewRows) {
    return {
        .method = Method::kTile,
        .rows = M,
        .columns = size_of_a_block(N, N),
        .terms = K};
  }
  // Several rows use the same copies of weights.
  const auto rows_of_a_block = M < 128 ? M : size_of_a_block(M, 384);
  return {
      .method = Method::kTile,
      .rows = rows_of_a_block,
      .columns = columns_of_a_block(N),
      .terms = K};
}

// d_weights = or += d_gates.T @ [old_h, input]
template <typename scalar_t, typename gemm_t, typename out_t>
void weights_gradient(
    const CellSizes& sizes,
    const GateGradients<gemm_t>& d_gates,
    const scalar_t* old_h,
    const scalar_t* input,
    out_t* d_weights,
    bool accumulate) {
  const auto product = [&](const scalar_t* B, int64_t N, out_t* C) {
    if (N == 0) {
      return;
    }
    ProductOnThreads<scalar_t, gemm_t, out_t>(
        {.M = d_gates.gate_units,
         .N = N,
         .K = sizes.batch,
         .A = d_gates.columns,
         .B = {B, N},
         .C = {C, sizes.features()},
         .accumulate = accumulate},
        blocks_of_weights<gemm_t>(d_gates.gate_units, N, sizes.batch))
        .run();
  };
  product(old_h, sizes.state_size, d_weights);
  product(input, sizes.input_features, d_weights + sizes.state_size);
}

// result, the gradient of old_h or of input, = d_gates @ the columns of weights
// that it is multiplied by.
template <typename scalar_t, typename gemm_t>
void rows_gradient(
    const CellSizes& sizes,
    const GateGradients<gemm_t>& d_gates,
    const scalar_t* columns_of_weights,
    int64_t columns,
    scalar_t* result) {
  if (columns == 0) {
    return;
  }
  ProductOnThreads<scalar_t, gemm_t, scalar_t>(
      {.M = sizes.batch,
       .N = columns,
       .K = d_gates.gate_units,
       .A = d_gates.rows,
       .B = {columns_of_weights, sizes.features()},
       .C = {result, columns},
       .accumulate = false},
      blocks_of_rows<scalar_t, gemm_t>(
          sizes.batch, columns, d_gates.gate_units))
      .run();
}

// d_bias = or += sums over the batch.
template <typename out_t, typename gemm_t>
struct BiasGradient {
  using opmath_t = at::opmath_type<out_t>;

  const GateGradients<gemm_t>& d_gates;
  out_t* d_bias;
  bool accumulate;

  // begin and end count gate units. Sums of a few rows are added to one another
  // in double: one float chain over a large batch has ten times the error of
  // PyTorch's sum.
  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    constexpr auto rows = 64 * kVector;
    for (int64_t unit = begin; unit < end; ++unit) {
      double total = accumulate ? load(d_bias[unit]) : opmath_t(0);
      const auto* values = d_gates.columns.row(unit);
      for (int64_t row = 0; row < d_gates.batch; row += rows) {
        total += sum(values + row, std::min(rows, d_gates.batch - row));
      }
      store(static_cast<opmath_t>(total), d_bias[unit]);
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
void bias_gradient(
    const GateGradients<gemm_t>& d_gates,
    out_t* d_bias,
    bool accumulate) {
  at::parallel_for(
      0,
      d_gates.gate_units,
      grain_size(d_gates.batch / kPackedPerNanosecond),
      [&](int64_t begin, int64_t end) {
        vectorized<BiasGradient<out_t, gemm_t>>(
            {d_gates, d_bias, accumulate}, begin, end);
      });
}

} // namespace lltm
