#pragma once

#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/tile.h"
#include "cpu/primitives/vectorize.h"

#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

// Products with the transpose of B, for a few rows of A. A and B are read along
// their rows, as they lie; packing B would cost more.
namespace lltm {

template <typename T>
struct Dot {
  const Product<T>& p;
  int64_t k; // the first of these terms
  int64_t terms;

  // begin and end count rows of B. All rows of A pass over a few of them, which
  // stay in the cache.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr int64_t at_once = 12;
    for (auto row = begin; row < end; row += at_once) {
      in_tiles<kRowsOfA<kBytes>>(
          p.M,
          Tiles<kBytes>{
              .p = p,
              .k = k,
              .terms = terms,
              .begin = row,
              .end = std::min(row + at_once, end)});
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
    const Product<T>& p;
    int64_t k;
    int64_t terms;
    int64_t begin; // rows of B
    int64_t end;

    template <int64_t kM>
    C10_ALWAYS_INLINE void rows(int64_t row) const {
      constexpr auto at_once = kRowsOfB<kBytes, kM>;
      auto column = begin;
      for (; column + at_once <= end; column += at_once) {
        products<kM, at_once>(row, column);
      }
      for (; column < end; ++column) {
        products<kM, 1>(row, column);
      }
    }

    template <int64_t kM, int64_t kN>
    C10_ALWAYS_INLINE void products(int64_t row, int64_t column) const {
      using lanes_t = typename Lanes<T, kBytes>::type;
      constexpr auto lanes = Lanes<T, kBytes>::count;
      auto A = p.A.part(row, k);
      auto B = p.B.part(column, k);
      lanes_t sums[kM][kN] = {};
      const bool accumulate = p.accumulate || k > 0;
      alignas(64) T last_a[kM][lanes], last_b[kN][lanes];
      // Whole vectors of terms come first, then the rest, padded with zeros.
      // The same code adds both, so all tiles round alike.
      auto terms_of_pass = terms / lanes * lanes;
#pragma GCC unroll 1
      for (int64_t passes = terms_of_pass == terms ? 1 : 2; passes > 0;
           --passes) {
        for (int64_t offset = 0; offset < terms_of_pass; offset += lanes) {
          lanes_t a[kM], b;
          // Without the pragmas gcc 12 keeps the sums in memory.
#pragma GCC unroll 8
          for (int64_t i = 0; i < kM; ++i) {
            load_lanes(A.row(i) + offset, a[i]);
          }
#pragma GCC unroll 8
          for (int64_t j = 0; j < kN; ++j) {
            load_lanes(B.row(j) + offset, b);
#pragma GCC unroll 8
            for (int64_t i = 0; i < kM; ++i) {
              sums[i][j] += b * a[i];
            }
          }
        }
        if (passes == 2) {
          copy_rest(A, last_a);
          copy_rest(B, last_b);
          A = {last_a[0], lanes};
          B = {last_b[0], lanes};
          terms_of_pass = lanes;
        }
      }
#pragma GCC unroll 8
      for (int64_t i = 0; i < kM; ++i) {
        T totals[kN];
        add_lanes_of<T, kBytes, kN>(sums[i], totals);
        auto* C = p.C.row(row + i) + column;
        for (int64_t j = 0; j < kN; ++j) {
          C[j] = accumulate ? C[j] + totals[j] : totals[j];
        }
      }
    }

    template <int64_t kRows, int64_t kLanes>
    C10_ALWAYS_INLINE void copy_rest(
        Matrix<const T> from,
        T (&to)[kRows][kLanes]) const {
      const auto rest = terms % kLanes;
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t j = 0; j < kLanes; ++j) {
          to[i][j] = j < rest ? from.row(i)[terms - rest + j] : T(0);
        }
      }
    }
  };
};

// C = A @ B.T, or C += A @ B.T.
template <typename T>
void dot(const Product<T>& p) {
  // Each lane of a sum is a chain of its own.
  const auto most = kMaxChain * vector_bytes() / int64_t(sizeof(T));
  for (int64_t k = 0; k < p.K; k += most) {
    const auto terms = std::min(most, p.K - k);
    vectorized<Dot<T>>({p, k, terms}, 0, p.N);
  }
}

} // namespace lltm
