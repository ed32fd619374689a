#pragma once

#include "cpu/primitives/matrix.h"
#include "cpu/primitives/registers.h"

#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

// Products on the calling thread, with their sums in registers.

// Hides from the compiler how a pointer was computed.
#define LLTM_HIDE(pointer) __asm__("" : "+r"(pointer))

namespace lltm {

// Rows of A whose sums fit in registers.
template <int64_t kBytes, int64_t kVectors>
constexpr int64_t kTileRows =
    kVectors == 1 ? (kHasManyRegisters<kBytes> ? 12 : 8)
                  : (kHasManyRegisters<kBytes> ? 24 : 12) / kVectors;

// Calls body<rows>(first): the number of rows, at most kMost, is a constant.
template <int64_t kMost, typename Body>
C10_ALWAYS_INLINE void tile_of(int64_t rows, const Body& body, int64_t first) {
  if constexpr (kMost > 1) {
    if (rows < kMost) {
      return tile_of<kMost - 1>(rows, body, first);
    }
  }
  body.template operator()<kMost>(first);
}

// The same for any number of rows, in the fewest tiles, as equal as they can
// be: body<rows of a tile>(its first row).
template <int64_t kMost, typename Body>
C10_ALWAYS_INLINE void in_tiles(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (auto tiles = (rows + kMost - 1) / kMost; tiles > 0; --tiles) {
    const auto size = (rows - row + tiles - 1) / tiles;
    tile_of<kMost>(size, body, row);
    row += size;
  }
}

// C [kRows, columns] = A @ B, or C += A @ B, for kVectors whole vectors of
// columns; or, if not kWhole, for the first columns of one. Each sum is added
// up in kChains chains, which take the terms in turn. The sums are a local
// array of the function that has the loop: gcc keeps any other in memory.
template <
    typename T,
    int64_t kBytes,
    int64_t kRows,
    int64_t kVectors,
    int64_t kChains,
    bool kWhole>
C10_ALWAYS_INLINE void tile(
    int64_t K,
    Matrix<const T> A,
    Matrix<const T> B,
    Matrix<T> C,
    int64_t columns,
    bool accumulate) {
  using lanes_t = typename Lanes<T, kBytes>::type;
  constexpr auto lanes = Lanes<T, kBytes>::count;
  lanes_t sums[kChains][kRows][kVectors] = {};
  // If not kWhole, whole vectors are read all the same, where other rows of B
  // follow, and the last rows of B from a copy.
  const auto first_copied = kWhole
      ? K
      : std::max<int64_t>(0, K - (lanes - columns + B.ld - 1) / B.ld);
  alignas(64) T copied[kWhole ? 1 : lanes][lanes] = {};
  for (auto k = first_copied; k < K; ++k) {
    std::copy_n(B.row(k), columns, copied[k - first_copied]);
  }
  // gcc then adds a few multiples of ld to a few pointers; it would keep a
  // pointer to each of 12 rows, in registers of vectors.
  constexpr int64_t of_a_pointer = 4;
  const T* a[(kRows + of_a_pointer - 1) / of_a_pointer];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kRows; i += of_a_pointer) {
    a[i / of_a_pointer] = A.row(i);
    LLTM_HIDE(a[i / of_a_pointer]);
  }
  for (int64_t first = 0; first < K; first += kChains) {
#pragma GCC unroll 4
    for (int64_t chain = 0; chain < kChains; ++chain) {
      const auto k = first + chain;
      if (kChains > 1 && k >= K) {
        break;
      }
      const T* row =
          kWhole || k < first_copied ? B.row(k) : copied[k - first_copied];
      lanes_t b[kVectors];
#pragma GCC unroll 8
      for (int64_t j = 0; j < kVectors; ++j) {
        load_lanes(row + j * lanes, b[j]);
      }
#pragma GCC unroll 24
      for (int64_t i = 0; i < kRows; ++i) {
        const T value = a[i / of_a_pointer][i % of_a_pointer * A.ld + k];
#pragma GCC unroll 8
        for (int64_t j = 0; j < kVectors; ++j) {
          sums[chain][i][j] += value * b[j]; // the compiler fuses them
        }
      }
    }
  }
#pragma GCC unroll 24
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) {
      lanes_t sum = sums[0][i][j];
#pragma GCC unroll 4
      for (int64_t chain = 1; chain < kChains; ++chain) {
        sum += sums[chain][i][j];
      }
      T* c = C.row(i) + j * lanes;
      if constexpr (kWhole) {
        if (accumulate) {
          lanes_t before;
          load_lanes(c, before);
          sum += before;
        }
        store_lanes(sum, c);
      } else {
        T last[lanes];
        store_lanes(sum, last);
        for (int64_t lane = 0; lane < columns; ++lane) {
          c[lane] = accumulate ? c[lane] + last[lane] : last[lane];
        }
      }
    }
  }
}

} // namespace lltm
