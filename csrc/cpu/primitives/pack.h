#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

// Copies of matrices into the layouts and types that products take. The bodies
// are for vectorized().
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

#ifdef LLTM_SHUFFLE
// 4 x 4 words: every instruction set shuffles 16 bytes.
C10_ALWAYS_INLINE void transpose_words(
    const void* from,
    int64_t row_bytes_from,
    void* to,
    int64_t row_bytes_to) {
  Lanes<float, 16>::type rows[4];
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

// to [columns, rows] = from [rows, columns].T
template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void transpose_elements(
    const from_t* __restrict__ from,
    int64_t ld_from,
    int64_t rows,
    int64_t columns,
    to_t* __restrict__ to,
    int64_t ld_to) {
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row) {
      move(from[row * ld_from + column], to[column * ld_to + row]);
    }
  }
}

// The same, of at most kVector rows and columns.
template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void transpose_block(
    const from_t* from,
    int64_t ld_from,
    int64_t rows,
    int64_t columns,
    to_t* to,
    int64_t ld_to) {
#ifdef LLTM_SHUFFLE
  if constexpr (std::is_same_v<from_t, to_t> && sizeof(from_t) == 4) {
    const auto whole_rows = rows / 4 * 4;
    const auto whole_columns = columns / 4 * 4;
    for (int64_t i = 0; i < whole_columns; i += 4) {
      for (int64_t j = 0; j < whole_rows; j += 4) {
        transpose_words(
            from + j * ld_from + i, ld_from * 4, to + i * ld_to + j, ld_to * 4);
      }
    }
    transpose_elements(
        from + whole_columns,
        ld_from,
        whole_rows,
        columns - whole_columns,
        to + whole_columns * ld_to,
        ld_to);
    return transpose_elements(
        from + whole_rows * ld_from,
        ld_from,
        rows - whole_rows,
        columns,
        to + whole_rows,
        ld_to);
  }
#endif
  // With limits that gcc knows, it makes vectors of this.
  if (rows == kVector && columns == kVector) {
    transpose_elements(from, ld_from, kVector, kVector, to, ld_to);
  } else {
    transpose_elements(from, ld_from, rows, columns, to, ld_to);
  }
}

// The same for matrices of any size.
template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void transpose(
    const from_t* from,
    int64_t ld_from,
    int64_t rows,
    int64_t columns,
    to_t* to,
    int64_t ld_to) {
  for (int64_t row = 0; row < rows; row += kVector) {
    for (int64_t column = 0; column < columns; column += kVector) {
      transpose_block(
          from + row * ld_from + column,
          ld_from,
          std::min(kVector, rows - row),
          std::min(kVector, columns - column),
          to + column * ld_to + row,
          ld_to);
    }
  }
}

// Packs B [K, columns] of gemm() from its transpose, for K in [begin, end). to
// is [K, ld_to], or [K / 2, ld_to, 2] where the elements are Pairs; then begin
// and end count pairs. The columns after the last, up to padded, become zero.
template <typename from_t, typename to_t>
struct PackTransposed {
  const from_t* from;
  int64_t ld_from;
  int64_t columns;
  int64_t padded;
  to_t* to;
  int64_t ld_to;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    transpose(
        from + begin, ld_from, columns, end - begin, to + begin * ld_to, ld_to);
    for (int64_t k = begin; k < end; ++k) {
      for (int64_t column = columns; column < padded; ++column) {
        to[k * ld_to + column] = {};
      }
    }
  }
};

// to = from, for rows in [begin, end).
template <typename from_t, typename to_t>
struct ConvertRows {
  const from_t* from;
  int64_t ld_from;
  int64_t columns;
  to_t* to;
  int64_t ld_to;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      one_row(from + row * ld_from, to + row * ld_to);
    }
  }

  C10_ALWAYS_INLINE void one_row(
      const from_t* __restrict__ from,
      to_t* __restrict__ to) const {
    for (int64_t i = 0; i < columns; ++i) {
      move(from[i], to[i]);
    }
  }
};

// to = from, of so many elements, on all threads.
template <typename from_t, typename to_t>
void convert(const from_t* from, to_t* to, int64_t size) {
  at::parallel_for(
      0,
      size,
      grain_size(1) * kPackedPerNanosecond,
      [&](int64_t begin, int64_t end) {
        const auto part = end - begin;
        vectorized<ConvertRows<from_t, to_t>>()(
            {from + begin, part, part, to + begin, part}, 0, 1);
      });
}

// size elements in opmath_t: as they lie, or converted.
template <typename scalar_t>
class InOpmath {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  InOpmath(const scalar_t* from, int64_t size) : copy_(kConverts ? size : 0) {
    if constexpr (kConverts) {
      convert(from, copy_.data(), size);
      data_ = copy_.data();
    } else {
      data_ = from;
    }
  }

  const opmath_t* data() const {
    return data_;
  }

 private:
  static constexpr bool kConverts = !std::is_same_v<scalar_t, opmath_t>;

  const Scratch<opmath_t> copy_;
  const opmath_t* data_;
};

// Packs B [rows, columns] of gemm() as it lies, for groups of kPair rows in
// [begin, end). Rows that are not there are zero.
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
    const auto whole = std::clamp(rows / pair, begin, end);
    if constexpr (pair == 1) {
      ConvertRows<scalar_t, gemm_t>{from, ld_from, columns, to, ld_to}(
          begin, whole);
    } else {
      for (int64_t group = begin; group < whole; ++group) {
        const auto* row = from + group * pair * ld_from;
        two_rows(row, row + ld_from, to + group * pair * ld_to);
      }
    }
    for (int64_t group = whole; group < end; ++group) {
      rest(
          from + group * pair * ld_from,
          std::max<int64_t>(0, rows - group * pair),
          to + group * pair * ld_to);
    }
  }

  // By the bits: loops that copy the struct do not vectorise.
  C10_ALWAYS_INLINE void two_rows(
      const scalar_t* __restrict__ first,
      const scalar_t* __restrict__ second,
      gemm_t* __restrict__ to) const {
    for (int64_t column = 0; column < columns; ++column) {
      to[2 * column].x = first[column].x;
      to[2 * column + 1].x = second[column].x;
    }
  }

  C10_ALWAYS_INLINE void
  rest(const scalar_t* from, int64_t rows_left, gemm_t* to) const {
    constexpr auto pair = kPair<gemm_t>;
    for (int64_t i = 0; i < pair; ++i) {
      for (int64_t column = 0; column < columns; ++column) {
        to[column * pair + i] = {};
        if (i < rows_left) {
          move(from[i * ld_from + column], to[column * pair + i]);
        }
      }
    }
  }
};

} // namespace lltm
