#pragma once

#include "cpu/primitives/lanes.h"
#include "cpu/primitives/matrix.h"

#include <c10/macros/Macros.h>

#include <cstdint>

// Products on the calling thread, with their sums in registers.
namespace lltm {

// C [kRows, kVectors vectors] = A @ B, or C += A @ B. The sums are a local
// array of the function that has the loop: gcc keeps any other in memory. Each
// sum is added up in kChains chains, which take the terms in turn.
template <
    typename T,
    int64_t kBytes,
    int64_t kRows,
    int64_t kVectors,
    int64_t kChains>
C10_ALWAYS_INLINE void tile(
    int64_t K,
    Matrix<const T> A,
    Matrix<const T> B,
    Matrix<T> C,
    bool accumulate) {
  using lanes_t = typename Lanes<T, kBytes>::type;
  constexpr auto lanes = Lanes<T, kBytes>::count;
  lanes_t sums[kChains][kRows][kVectors] = {};
  int64_t k = 0;
  for (; k + kChains <= K; k += kChains) {
#pragma GCC unroll 4
    for (int64_t chain = 0; chain < kChains; ++chain) {
      lanes_t b[kVectors];
#pragma GCC unroll 8
      for (int64_t j = 0; j < kVectors; ++j) {
        load_lanes(B.row(k + chain) + j * lanes, b[j]);
      }
#pragma GCC unroll 16
      for (int64_t i = 0; i < kRows; ++i) {
        const T a = A.row(i)[k + chain];
#pragma GCC unroll 8
        for (int64_t j = 0; j < kVectors; ++j) {
          sums[chain][i][j] += a * b[j]; // the compiler fuses them
        }
      }
    }
  }
  for (; k < K; ++k) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) {
      lanes_t b;
      load_lanes(B.row(k) + j * lanes, b);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kRows; ++i) {
        sums[0][i][j] += A.row(i)[k] * b;
      }
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kVectors; ++j) {
      lanes_t sum = sums[0][i][j];
#pragma GCC unroll 4
      for (int64_t chain = 1; chain < kChains; ++chain) {
        sum += sums[chain][i][j];
      }
      T* c = C.row(i) + j * lanes;
      if (accumulate) {
        lanes_t before;
        load_lanes(c, before);
        sum += before;
      }
      store_lanes(sum, c);
    }
  }
}

// Rows of A whose sums fit in registers. One vector is for the last columns.
template <int64_t kBytes, int64_t kVectors>
constexpr int64_t kTileRows =
    kVectors == 1 ? 8 : (kHasManyRegisters<kBytes> ? 24 : 12) / kVectors;

// Calls body.rows<rows>(first), for at most kMost rows.
template <int64_t kMost, typename Body>
C10_ALWAYS_INLINE void tile_of(int64_t rows, const Body& body, int64_t first) {
  if constexpr (kMost > 1) {
    if (rows < kMost) {
      return tile_of<kMost - 1>(rows, body, first);
    }
  }
  body.template rows<kMost>(first);
}

// The same for any number of rows, with the fewest tiles, as equal as they can
// be.
template <int64_t kMost, typename Body>
C10_ALWAYS_INLINE void in_tiles(int64_t rows, const Body& body) {
  const auto tiles = (rows + kMost - 1) / kMost;
  const auto least = tiles > 0 ? rows / tiles : 0;
  // The first tiles have a row more.
  auto larger = rows - least * tiles;
  for (int64_t row = 0; row < rows; --larger) {
    const auto size = larger > 0 ? least + 1 : least;
    tile_of<kMost>(size, body, row);
    row += size;
  }
}

} // namespace lltm
