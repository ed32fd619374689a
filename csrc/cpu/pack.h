#pragma once

#include "cpu/convert.h"
#include "cpu/gemm.h"
#include "cpu/lanes.h"
#include "cpu/vectorize.h"

#include <cstring>
#include <type_traits>

// Copies of matrices into the layouts that gemm() takes. The bodies are for
// vectorized().
namespace lltm {

// What a transposition for gemm() moves as one.
template <typename gemm_t>
struct Pair {
  gemm_t first;
  gemm_t second;
};

template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void move(const from_t& from, to_t& to) {
  if constexpr (std::is_same_v<from_t, to_t>) {
    to = from;
  } else {
    store(load(from), to);
  }
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define LLTM_SHUFFLE __builtin_shufflevector
#endif
#endif

#ifdef LLTM_SHUFFLE
// 4 x 4 words: every instruction set shuffles 16 bytes.
C10_ALWAYS_INLINE void transpose_words(
    const void* from,
    int64_t row_bytes_from,
    void* to,
    int64_t row_bytes_to) {
  Lanes<float, 4>::type rows[4];
  for (int64_t i = 0; i < 4; ++i) {
    const auto* row = static_cast<const char*>(from) + i * row_bytes_from;
    std::memcpy(&rows[i], row, sizeof(rows[i]));
  }
  const auto low01 = LLTM_SHUFFLE(rows[0], rows[1], 0, 4, 1, 5);
  const auto low23 = LLTM_SHUFFLE(rows[2], rows[3], 0, 4, 1, 5);
  const auto high01 = LLTM_SHUFFLE(rows[0], rows[1], 2, 6, 3, 7);
  const auto high23 = LLTM_SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
  rows[0] = LLTM_SHUFFLE(low01, low23, 0, 1, 4, 5);
  rows[1] = LLTM_SHUFFLE(low01, low23, 2, 3, 6, 7);
  rows[2] = LLTM_SHUFFLE(high01, high23, 0, 1, 4, 5);
  rows[3] = LLTM_SHUFFLE(high01, high23, 2, 3, 6, 7);
  for (int64_t i = 0; i < 4; ++i) {
    auto* row = static_cast<char*>(to) + i * row_bytes_to;
    std::memcpy(row, &rows[i], sizeof(rows[i]));
  }
}
#endif

template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void transpose_tile(
    const from_t* __restrict__ from,
    int64_t ld_from,
    to_t* __restrict__ to,
    int64_t ld_to) {
#ifdef LLTM_SHUFFLE
  if constexpr (std::is_same_v<from_t, to_t> && sizeof(from_t) == 4) {
    for (int64_t i = 0; i < kVector; i += 4) {
      for (int64_t j = 0; j < kVector; j += 4) {
        transpose_words(
            from + j * ld_from + i, ld_from * 4, to + i * ld_to + j, ld_to * 4);
      }
    }
    return;
  }
#endif
  for (int64_t i = 0; i < kVector; ++i) {
    for (int64_t j = 0; j < kVector; ++j) {
      move(from[j * ld_from + i], to[i * ld_to + j]);
    }
  }
}

// to [columns, rows] = from [rows, columns].T
template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void transpose(
    const from_t* from,
    int64_t ld_from,
    int64_t rows,
    int64_t columns,
    to_t* to,
    int64_t ld_to) {
  const int64_t whole_rows = rows / kVector * kVector;
  const int64_t whole_columns = columns / kVector * kVector;
  for (int64_t row = 0; row < whole_rows; row += kVector) {
    for (int64_t column = 0; column < whole_columns; column += kVector) {
      transpose_tile(
          from + row * ld_from + column,
          ld_from,
          to + column * ld_to + row,
          ld_to);
    }
  }
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t first = row < whole_rows ? whole_columns : 0;
    for (int64_t column = first; column < columns; ++column) {
      move(from[row * ld_from + column], to[column * ld_to + row]);
    }
  }
}

// Packs B [K, columns] of gemm() from its transpose, for K in [begin, end):
// to is [K, ld_to], or for pairs [K / 2, ld_to, 2] from words of two K.
template <typename from_t, typename to_t>
struct PackTransposed {
  const from_t* from;
  int64_t ld_from;
  int64_t columns;
  to_t* to;
  int64_t ld_to;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    transpose(
        from + begin, ld_from, columns, end - begin, to + begin * ld_to, ld_to);
    for (int64_t k = begin; k < end; ++k) {
      for (int64_t column = columns; column < ld_to; ++column) {
        to[k * ld_to + column] = {};
      }
    }
  }
};

// Packs B [rows, columns] of gemm() as it lies, for groups of kPair rows in
// [begin, end). The row that completes the last pair is zero.
template <typename scalar_t, typename gemm_t>
struct PackRows {
  const scalar_t* from;
  int64_t ld_from;
  int64_t rows;
  int64_t columns;
  gemm_t* to;
  int64_t ld_to;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    constexpr auto pair = kPair<gemm_t>;
    for (int64_t group = begin; group < end; ++group) {
      for (int64_t i = 0; i < pair; ++i) {
        const int64_t row = group * pair + i;
        copy(
            from + row * ld_from,
            row < rows ? columns : 0,
            to + group * pair * ld_to + i);
      }
    }
  }

  C10_ALWAYS_INLINE void copy(
      const scalar_t* __restrict__ from,
      int64_t available,
      gemm_t* __restrict__ to) const {
    constexpr auto pair = kPair<gemm_t>;
    for (int64_t column = 0; column < available; ++column) {
      move(from[column], to[column * pair]);
    }
    for (int64_t column = available; column < columns; ++column) {
      to[column * pair] = {};
    }
  }
};

template <typename from_t, typename to_t>
struct Convert {
  const from_t* from;
  to_t* to;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    convert(from + begin, to + begin, end - begin);
  }

  C10_ALWAYS_INLINE void convert(
      const from_t* __restrict__ from,
      to_t* __restrict__ to,
      int64_t size) const {
    for (int64_t i = 0; i < size; ++i) {
      move(from[i], to[i]);
    }
  }
};

} // namespace lltm
