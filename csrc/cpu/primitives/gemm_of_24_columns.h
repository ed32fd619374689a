#pragma once

#include "cpu/choices.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/vectorize.h"

#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>

// Products with 24 columns in float32. With AVX-512, oneDNN computes them as
// 32. Here K is folded: a vector holds two terms for each of 8 columns, so
// three vectors hold no padding.
namespace lltm {

constexpr int64_t kFoldedColumns = 24;
static_assert(kFoldedColumns == kVector + kVector / 2);

// Makes [K / 2, 24, 2] of a packed B [K, 24], in place, for pairs of rows in
// [begin, end). The row after the last of an odd K has to be zero.
struct FoldRows {
  float* B;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t pair = begin; pair < end; ++pair) {
      float rows[2][kFoldedColumns];
      auto* to = B + pair * 2 * kFoldedColumns;
      std::memcpy(rows, to, sizeof(rows));
      for (int64_t column = 0; column < kFoldedColumns; ++column) {
        to[2 * column] = rows[0][column];
        to[2 * column + 1] = rows[1][column];
      }
    }
  }
};

// C [rows, 24] = A @ B, or C += A @ B. The body is for vectorized().
struct GemmOf24Columns {
  int64_t K;
  const float* A;
  int64_t lda;
  const float* B;
  float* C;
  bool accumulate;

  // Rows of C.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    auto row = begin;
    if constexpr (kHasManyRegisters<kBytes>) {
      row = tiles<kBytes, 6>(row, end);
      row = tiles<kBytes, 3>(row, end);
    }
    tiles<kBytes, 1>(row, end);
  }

  // Returns the first row that is left.
  template <int64_t kBytes, int64_t kRows>
  C10_ALWAYS_INLINE int64_t tiles(int64_t row, int64_t end) const {
    for (; row + kRows <= end; row += kRows) {
      tile<kBytes, kRows>(row);
    }
    return row;
  }

  template <int64_t kBytes>
  static constexpr int64_t kVectors =
      2 * kFoldedColumns * sizeof(float) / kBytes;

  template <int64_t kBytes, int64_t kRows>
  using Sums = typename Lanes<float, kBytes>::type[kRows][kVectors<kBytes>];

  template <int64_t kBytes, int64_t kRows>
  C10_ALWAYS_INLINE void tile(int64_t row) const {
    Sums<kBytes, kRows> sums = {};
    int64_t k = 0;
    for (; k + 2 <= K; k += 2) {
      terms<kBytes, kRows, 2>(row, k, sums);
    }
    if (k < K) {
      terms<kBytes, kRows, 1>(row, k, sums);
    }
    for (int64_t i = 0; i < kRows; ++i) {
      alignas(64) float pairs[2 * kFoldedColumns];
      for (int64_t v = 0; v < kVectors<kBytes>; ++v) {
        store_lanes(sums[i][v], pairs + v * Lanes<float, kBytes>::count);
      }
      add_pairs(pairs, C + (row + i) * kFoldedColumns);
    }
  }

  template <int64_t kBytes, int64_t kRows, int64_t kTerms>
  C10_ALWAYS_INLINE void
  terms(int64_t row, int64_t k, Sums<kBytes, kRows>& sums) const {
    using lanes_t = typename Lanes<float, kBytes>::type;
    lanes_t b[kVectors<kBytes>];
#pragma GCC unroll 12
    for (int64_t v = 0; v < kVectors<kBytes>; ++v) {
      load_lanes(
          B + k * kFoldedColumns + v * Lanes<float, kBytes>::count, b[v]);
    }
#pragma GCC unroll 6
    for (int64_t i = 0; i < kRows; ++i) {
      lanes_t a;
      broadcast<kBytes, kTerms>(A + (row + i) * lda + k, a);
#pragma GCC unroll 12
      for (int64_t v = 0; v < kVectors<kBytes>; ++v) {
        sums[i][v] += a * b[v];
      }
    }
  }

  // Two terms in turn in all lanes, or one and zero: the other lane of an odd K
  // holds a zero in B, and infinity times that would be NaN.
  template <int64_t kBytes, int64_t kTerms>
  static C10_ALWAYS_INLINE void broadcast(
      const float* from,
      typename Lanes<float, kBytes>::type& to) {
    float terms[2] = {};
    std::memcpy(terms, from, kTerms * sizeof(float));
    int64_t bits;
    std::memcpy(&bits, terms, sizeof(bits));
    const auto all = typename Lanes<int64_t, kBytes>::type{} + bits;
    std::memcpy(&to, &all, sizeof(to));
  }

  C10_ALWAYS_INLINE void add_pairs(
      const float* __restrict__ pairs,
      float* __restrict__ to) const {
    for (int64_t column = 0; column < kFoldedColumns; ++column) {
      const auto sum = pairs[2 * column] + pairs[2 * column + 1];
      to[column] = accumulate ? to[column] + sum : sum;
    }
  }
};

} // namespace lltm
