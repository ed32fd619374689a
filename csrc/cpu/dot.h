#pragma once

#include "cpu/lanes.h"
#include "cpu/vectorize.h"

#include <c10/macros/Macros.h>

#include <cstdint>

// out = x @ weights.T for a few rows of x. Both are read along their rows, as
// they lie: the weights stream past once, where packing them would cost more.
namespace lltm {

// out [kBatch, rows] = x [kBatch, K] @ weights [rows, K].T for rows in
// [begin, end), whole groups of kRows.
template <typename T, int64_t kBatch, int64_t kRows>
struct DotTile {
  const T* x;
  const T* weights;
  int64_t K;
  T* out;
  int64_t ld_out;

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr auto at_once = rows_at_once<kBytes>();
    for (int64_t row = begin; row < end; row += at_once) {
      tile<kBytes, at_once>(weights + row * K, out + row);
    }
  }

  // Rows of weights whose sums fit in registers.
  template <int64_t kBytes>
  static constexpr int64_t rows_at_once() {
    constexpr int64_t few = kBatch == 4 ? 3 : 4;
    return kHasManyRegisters<kBytes> || kRows < few ? kRows : few;
  }

  template <int64_t kBytes, int64_t kTileRows>
  C10_ALWAYS_INLINE void tile(const T* weights, T* out) const {
    using lanes_t = typename Lanes<T, kBytes>::type;
    constexpr auto lanes = Lanes<T, kBytes>::count;
    lanes_t sums[kBatch][kTileRows] = {};
    int64_t k = 0;
    for (; k + lanes <= K; k += lanes) {
      lanes_t w, xs[kBatch];
      // Or gcc 12 keeps the sums of four rows in memory.
#pragma GCC unroll 8
      for (int64_t b = 0; b < kBatch; ++b) {
        load_lanes(x + b * K + k, xs[b]);
      }
#pragma GCC unroll 8
      for (int64_t row = 0; row < kTileRows; ++row) {
        load_lanes(weights + row * K + k, w);
#pragma GCC unroll 8
        for (int64_t b = 0; b < kBatch; ++b) {
          sums[b][row] += w * xs[b];
        }
      }
    }
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t row = 0; row < kTileRows; ++row) {
        T sum = add_lanes<T, kBytes>(sums[b][row]);
        for (int64_t i = k; i < K; ++i) {
          sum += x[b * K + i] * weights[row * K + i];
        }
        out[b * ld_out + row] = sum;
      }
    }
  }
};

template <typename T, int64_t kBatch, int64_t kRows>
void dot_rows(
    const T* x,
    const T* weights,
    int64_t rows,
    int64_t K,
    T* out,
    int64_t ld_out) {
  const auto whole = rows / kRows * kRows;
  vectorized<DotTile<T, kBatch, kRows>>()(
      {x, weights, K, out, ld_out}, 0, whole);
  if (whole < rows) {
    vectorized<DotTile<T, kBatch, 1>>()(
        {x, weights, K, out, ld_out}, whole, rows);
  }
}

// Tiles of 4, 2 and 1 rows of x. How many sums each keeps in registers was
// measured.
template <typename T>
void dot(
    int64_t batch,
    const T* x,
    const T* weights,
    int64_t rows,
    int64_t K,
    T* out,
    int64_t ld_out) {
  int64_t b = 0;
  for (; b + 4 <= batch; b += 4) {
    dot_rows<T, 4, 6>(x + b * K, weights, rows, K, out + b * ld_out, ld_out);
  }
  if (b + 2 <= batch) {
    dot_rows<T, 2, 8>(x + b * K, weights, rows, K, out + b * ld_out, ld_out);
    b += 2;
  }
  if (b < batch) {
    dot_rows<T, 1, 4>(x + b * K, weights, rows, K, out + b * ld_out, ld_out);
  }
}

} // namespace lltm
