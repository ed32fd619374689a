#pragma once

#include "cpu/lanes.h"
#include "cpu/vectorize.h"

#include <c10/macros/Macros.h>

#include <cstdint>

// out = x @ weights.T for a few rows of x. Both are read along their rows, as
// they lie: the weights stream past once, where packing them would cost more.
namespace lltm {

// out [kBatch, rows] = x [kBatch, K] @ weights [rows, K].T for rows in
// [begin, end), kRows at once.
template <typename T, int64_t kBatch, int64_t kRows>
struct DotTile {
  const T* x;
  const T* weights;
  int64_t K;
  T* out;
  int64_t ld_out;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; row += kRows) {
      tile(weights + row * K, out + row);
    }
  }

  C10_ALWAYS_INLINE void tile(const T* weights, T* out) const {
    constexpr auto lanes = Lanes<T>::count;
    typename Lanes<T>::type sums[kBatch][kRows] = {};
    int64_t k = 0;
    for (; k + lanes <= K; k += lanes) {
      typename Lanes<T>::type w, xs[kBatch];
      for (int64_t b = 0; b < kBatch; ++b) {
        load_lanes(x + b * K + k, xs[b]);
      }
      for (int64_t row = 0; row < kRows; ++row) {
        load_lanes(weights + row * K + k, w);
        for (int64_t b = 0; b < kBatch; ++b) {
          sums[b][row] += w * xs[b];
        }
      }
    }
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t row = 0; row < kRows; ++row) {
        T sum = add_lanes<T>(sums[b][row]);
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
