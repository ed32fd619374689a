#pragma once

#include "cpu/primitives/lanes.h"
#include "cpu/primitives/vectorize.h"

#include <c10/macros/Macros.h>

#include <cstdint>

// C = A @ B.T, or C += A @ B.T, mostly for a few rows of A. A and B are read
// along their rows, as they lie. The rows of B stream past once for every four
// rows of A; packing them would cost more.
namespace lltm {

// For kM rows of A, and rows [begin, end) of B, whole groups of kN.
template <typename T, int64_t kM, int64_t kN>
struct DotTile {
  int64_t K;
  const T* A;
  int64_t lda;
  const T* B;
  int64_t ldb;
  T* C;
  int64_t ldc;
  bool accumulate;

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr auto at_once = rows_at_once<kBytes>();
    for (int64_t row = begin; row < end; row += at_once) {
      tile<kBytes, at_once>(B + row * ldb, C + row);
    }
  }

  // Rows of B whose sums fit in registers.
  template <int64_t kBytes>
  static constexpr int64_t rows_at_once() {
    constexpr int64_t few = kM == 4 ? 3 : 4;
    return kHasManyRegisters<kBytes> || kN < few ? kN : few;
  }

  template <int64_t kBytes, int64_t kRows>
  C10_ALWAYS_INLINE void tile(const T* B, T* C) const {
    using lanes_t = typename Lanes<T, kBytes>::type;
    constexpr auto lanes = Lanes<T, kBytes>::count;
    lanes_t sums[kM][kRows] = {};
    int64_t k = 0;
    for (; k + lanes <= K; k += lanes) {
      lanes_t b, a[kM];
      // Without the pragmas gcc 12 keeps the sums of four rows in memory.
#pragma GCC unroll 8
      for (int64_t i = 0; i < kM; ++i) {
        load_lanes(A + i * lda + k, a[i]);
      }
#pragma GCC unroll 8
      for (int64_t row = 0; row < kRows; ++row) {
        load_lanes(B + row * ldb + k, b);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kM; ++i) {
          sums[i][row] += b * a[i];
        }
      }
    }
    for (int64_t i = 0; i < kM; ++i) {
      for (int64_t row = 0; row < kRows; ++row) {
        T sum = add_lanes<T, kBytes>(sums[i][row]);
        for (int64_t rest = k; rest < K; ++rest) {
          sum += A[i * lda + rest] * B[row * ldb + rest];
        }
        auto& c = C[i * ldc + row];
        c = accumulate ? c + sum : sum;
      }
    }
  }
};

template <typename T, int64_t kM, int64_t kN>
void dot_rows(
    int64_t N,
    int64_t K,
    const T* A,
    int64_t lda,
    const T* B,
    int64_t ldb,
    T* C,
    int64_t ldc,
    bool accumulate) {
  const auto whole = N / kN * kN;
  vectorized<DotTile<T, kM, kN>>()(
      {K, A, lda, B, ldb, C, ldc, accumulate}, 0, whole);
  if (whole < N) {
    vectorized<DotTile<T, kM, 1>>()(
        {K, A, lda, B, ldb, C, ldc, accumulate}, whole, N);
  }
}

// Tiles of 4, 2 and 1 rows of A. How many sums each keeps in registers was
// measured.
template <typename T>
void dot(
    int64_t M,
    int64_t N,
    int64_t K,
    const T* A,
    int64_t lda,
    const T* B,
    int64_t ldb,
    T* C,
    int64_t ldc,
    bool accumulate) {
  int64_t i = 0;
  for (; i + 4 <= M; i += 4) {
    dot_rows<T, 4, 6>(
        N, K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, accumulate);
  }
  if (i + 2 <= M) {
    dot_rows<T, 2, 8>(
        N, K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, accumulate);
    i += 2;
  }
  if (i < M) {
    dot_rows<T, 1, 4>(
        N, K, A + i * lda, lda, B, ldb, C + i * ldc, ldc, accumulate);
  }
}

} // namespace lltm
