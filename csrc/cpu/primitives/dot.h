#pragma once

#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/tile.h"
#include "cpu/primitives/vectorize.h"

#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

// C = A @ B.T, or C += A @ B.T, for a few rows of A. A and B are read along
// their rows, as they lie; packing B would cost more.
namespace lltm {

template <typename T>
struct Dot {
  int64_t M;
  int64_t K;
  const T* A;
  int64_t lda;
  const T* B;
  int64_t ldb;
  T* C;
  int64_t ldc;
  bool accumulate;

  // Rows of B. All rows of A pass over a few of them, which stay in the cache.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr int64_t at_once = 12;
    for (auto row = begin; row < end; row += at_once) {
      in_tiles<kRowsOfA<kBytes>>(
          0, M, Tiles<kBytes>{*this, row, std::min(row + at_once, end)});
    }
  }

 private:
  template <int64_t kBytes>
  static constexpr int64_t kRowsOfA = kHasManyRegisters<kBytes> ? 6 : 4;

  // Rows of B whose sums fit in registers, and are enough chains to hide
  // the latency of an addition.
  template <int64_t kBytes, int64_t kM>
  static constexpr int64_t kRowsOfB = kM == 2 ? 6
      : kM == 4 && !kHasManyRegisters<kBytes> ? 3
                                              : 4;

  template <int64_t kBytes>
  struct Tiles {
    const Dot& p;
    int64_t begin; // rows of B
    int64_t end;

    template <int64_t kM>
    C10_ALWAYS_INLINE void rows(int64_t row) const {
      constexpr auto at_once = kRowsOfB<kBytes, kM>;
      auto column = begin;
      for (; column + at_once <= end; column += at_once) {
        tile<kM, at_once>(row, column);
      }
      for (; column < end; ++column) {
        tile<kM, 1>(row, column);
      }
    }

    template <int64_t kM, int64_t kN>
    C10_ALWAYS_INLINE void tile(int64_t row, int64_t column) const {
      using lanes_t = typename Lanes<T, kBytes>::type;
      constexpr auto lanes = Lanes<T, kBytes>::count;
      const auto* A = p.A + row * p.lda;
      const auto* B = p.B + column * p.ldb;
      auto lda = p.lda, ldb = p.ldb;
      lanes_t sums[kM][kN] = {};
      alignas(64) T last_a[kM][lanes], last_b[kN][lanes];
      // Whole vectors of terms, then the rest, padded with zeros: the same code
      // adds both, so all tiles round alike.
      auto terms = p.K / lanes * lanes;
#pragma GCC unroll 1
      for (int64_t left = terms == p.K ? 1 : 2; left > 0; --left) {
        for (int64_t k = 0; k < terms; k += lanes) {
          lanes_t a[kM], b;
          // Without the pragmas gcc 12 keeps the sums in memory.
#pragma GCC unroll 8
          for (int64_t i = 0; i < kM; ++i) {
            load_lanes(A + i * lda + k, a[i]);
          }
#pragma GCC unroll 8
          for (int64_t j = 0; j < kN; ++j) {
            load_lanes(B + j * ldb + k, b);
#pragma GCC unroll 8
            for (int64_t i = 0; i < kM; ++i) {
              sums[i][j] += b * a[i];
            }
          }
        }
        if (left == 2) {
          copy_rest(A, lda, last_a);
          copy_rest(B, ldb, last_b);
          A = last_a[0];
          B = last_b[0];
          lda = ldb = terms = lanes;
        }
      }
#pragma GCC unroll 8
      for (int64_t i = 0; i < kM; ++i) {
        T totals[kN];
        add_lanes_of<T, kBytes, kN>(sums[i], totals);
        auto* C = p.C + (row + i) * p.ldc + column;
        for (int64_t j = 0; j < kN; ++j) {
          C[j] = p.accumulate ? C[j] + totals[j] : totals[j];
        }
      }
    }

    template <int64_t kRows, int64_t kLanes>
    C10_ALWAYS_INLINE void
    copy_rest(const T* from, int64_t ld, T (&to)[kRows][kLanes]) const {
      const auto rest = p.K % kLanes;
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t k = 0; k < kLanes; ++k) {
          to[i][k] = k < rest ? from[i * ld + p.K - rest + k] : T(0);
        }
      }
    }
  };
};

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
  // Each lane of a sum is a chain of its own.
  const auto most = kMaxChain * vector_bytes() / int64_t(sizeof(T));
  int64_t k = 0;
  do {
    const auto terms = std::min(most, K - k);
    vectorized<Dot<T>>()(
        {M, terms, A + k, lda, B + k, ldb, C, ldc, accumulate || k > 0}, 0, N);
    k += most;
  } while (k < K);
}

} // namespace lltm
