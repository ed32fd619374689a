#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/vectorize.h"

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

namespace lltm {

// Vectors of columns that one or two rows read side by side: vectors of our own
// stream B faster, at 210 GB/s from L2, where oneDNN reaches 130. Zen 5.
constexpr int64_t kStreamedVectors = 3;

// C = A @ B, or C += A @ B, as gemm() of bfloat16, for kRows rows of A and
// whole vectors of columns [begin, end): B streams past at the bandwidth of the
// cache it lies in, of which oneDNN's products reach two thirds.
template <int64_t kRows, int64_t kVectors>
struct FewRows {
  int64_t K;
  const c10::BFloat16* A;
  int64_t lda;
  const c10::BFloat16* B;
  int64_t ldb;
  float* C;
  int64_t ldc;
  bool accumulate;

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    // Registers hold the sums of so many columns. The number divides
    // end - begin.
    constexpr auto at_once = kBytes == 16 ? kVector : kVectors * kVector;
    for (auto column = begin; column < end; column += at_once) {
      columns<kBytes, at_once / Lanes<float, kBytes>::count>(column);
    }
  }

  // Each result has two sums, because a chain of additions takes longer than a
  // load. Where registers are few, each of two rows has one sum: that makes two
  // chains already.
  template <int64_t kBytes>
  static constexpr int64_t kChains =
      kHasManyRegisters<kBytes> || kRows == 1 ? 2 : 1;

  template <int64_t kBytes, int64_t kCount>
  using Sums =
      typename Lanes<float, kBytes>::type[kChains<kBytes>][kRows][kCount];

  template <int64_t kBytes, int64_t kCount>
  C10_ALWAYS_INLINE void columns(int64_t column) const {
    constexpr auto lanes = Lanes<float, kBytes>::count;
    Sums<kBytes, kCount> sums = {};
    for (int64_t row = 0; accumulate && row < kRows; ++row) {
      for (int64_t v = 0; v < kCount; ++v) {
        load_lanes(C + row * ldc + column + v * lanes, sums[0][row][v]);
      }
    }
    for (int64_t k = 0; k < K; k += 2) {
      for (int64_t v = 0; v < kCount; ++v) {
        pairs<kBytes, kCount>(k, column + v * lanes, v, sums);
      }
    }
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < kCount; ++v) {
        if constexpr (kChains<kBytes> == 2) {
          sums[0][row][v] += sums[1][row][v];
        }
        store_lanes(sums[0][row][v], C + row * ldc + column + v * lanes);
      }
    }
  }

  // Words of two bfloat16, which are the upper halves of two floats.
  template <int64_t kBytes, int64_t kCount>
  C10_ALWAYS_INLINE void pairs(
      int64_t k,
      int64_t column,
      int64_t v,
      Sums<kBytes, kCount>& sums) const {
    typedef uint32_t words_t __attribute__((vector_size(kBytes)));
    words_t words;
    std::memcpy(&words, B + k * ldb + 2 * column, sizeof(words));
    const words_t low = words << 16;
    const words_t high = words & 0xffff0000u;
    typename Lanes<float, kBytes>::type first, second;
    std::memcpy(&first, &low, sizeof(first));
    std::memcpy(&second, &high, sizeof(second));
    for (int64_t row = 0; row < kRows; ++row) {
      sums[0][row][v] += load(A[row * lda + k]) * first;
      sums[kChains<kBytes> - 1][row][v] += load(A[row * lda + k + 1]) * second;
    }
  }
};

template <int64_t kRows>
void multiply_few_rows(
    int64_t N,
    int64_t K,
    const c10::BFloat16* A,
    int64_t lda,
    const c10::BFloat16* B,
    int64_t ldb,
    float* C,
    int64_t ldc,
    bool accumulate) {
  constexpr auto kVectors = kStreamedVectors;
  const auto whole = N / (kVectors * kVector) * kVectors * kVector;
  vectorized<FewRows<kRows, kVectors>>()(
      {K, A, lda, B, ldb, C, ldc, accumulate}, 0, whole);
  if (whole < N) {
    vectorized<FewRows<kRows, 1>>()(
        {K, A, lda, B, ldb, C, ldc, accumulate}, whole, N);
  }
}

// Does what gemm() does, for any number of rows. One or two rows of bfloat16 go
// to FewRows if all_columns, those of the product that these are a part of, are
// a whole number of vectors, as N then has to be: its sums are grouped
// otherwise.
template <typename gemm_t>
void gemm_of_rows(
    int64_t M,
    int64_t N,
    int64_t K,
    const gemm_t* A,
    int64_t lda,
    const gemm_t* B,
    int64_t ldb,
    float* C,
    int64_t ldc,
    bool accumulate,
    int64_t all_columns) {
  if constexpr (kPair<gemm_t> == 2) {
    if (all_columns % kVector == 0 && M == 1) {
      return multiply_few_rows<1>(N, K, A, lda, B, ldb, C, ldc, accumulate);
    }
    if (all_columns % kVector == 0 && M == 2) {
      return multiply_few_rows<2>(N, K, A, lda, B, ldb, C, ldc, accumulate);
    }
  }
  for (int64_t row = 0, rows = 0; row < M; row += rows) {
    rows = rows_of_block(M - row);
    gemm<gemm_t>(
        rows, N, K, A + row * lda, lda, B, ldb, C + row * ldc, ldc, accumulate);
  }
}

} // namespace lltm
