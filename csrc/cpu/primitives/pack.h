#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/matrix.h"
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

// The elements that a transposition for gemm() moves as one.
template <typename gemm_t>
struct Pair {
  gemm_t first;
  gemm_t second;
};

template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void convert_element(const from_t& from, to_t& to) {
  if constexpr (std::is_same_v<from_t, to_t>) {
    to = from;
  } else {
    store(load(from), to);
  }
}

#ifdef LLTM_SHUFFLE
// to = from.T, 4 x 4 words: every instruction set shuffles 16 bytes.
template <typename T>
C10_ALWAYS_INLINE void transpose_words(Matrix<const T> from, Matrix<T> to) {
  Lanes<float, 16>::type rows[4];
  for (int64_t i = 0; i < 4; ++i) {
    std::memcpy(&rows[i], from.row(i), sizeof(rows[i]));
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
    std::memcpy(to.row(i), &rows[i], sizeof(rows[i]));
  }
}
#endif

// to [columns, rows] = from [rows, columns].T
template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void transpose_elements(
    Matrix<const from_t> from,
    int64_t rows,
    int64_t columns,
    Matrix<to_t> to) {
  const auto* __restrict__ from_data = from.data;
  auto* __restrict__ to_data = to.data;
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row) {
      convert_element(
          from_data[row * from.ld + column], to_data[column * to.ld + row]);
    }
  }
}

// The same, of at most kVector rows and columns.
template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void transpose_block(
    Matrix<const from_t> from,
    int64_t rows,
    int64_t columns,
    Matrix<to_t> to) {
#ifdef LLTM_SHUFFLE
  if constexpr (std::is_same_v<from_t, to_t> && sizeof(from_t) == 4) {
    const auto whole_rows = rows / 4 * 4;
    const auto whole_columns = columns / 4 * 4;
    for (int64_t i = 0; i < whole_columns; i += 4) {
      for (int64_t j = 0; j < whole_rows; j += 4) {
        transpose_words(from.part(j, i), to.part(i, j));
      }
    }
    transpose_elements(
        from.part(0, whole_columns),
        whole_rows,
        columns - whole_columns,
        to.part(whole_columns, 0));
    return transpose_elements(
        from.part(whole_rows, 0),
        rows - whole_rows,
        columns,
        to.part(0, whole_rows));
  }
#endif
  // With limits that gcc knows, it makes vectors of this.
  if (rows == kVector && columns == kVector) {
    transpose_elements(from, kVector, kVector, to);
  } else {
    transpose_elements(from, rows, columns, to);
  }
}

// The same for matrices of any size.
template <typename from_t, typename to_t>
C10_ALWAYS_INLINE void transpose(
    Matrix<const from_t> from,
    int64_t rows,
    int64_t columns,
    Matrix<to_t> to) {
  for (int64_t row = 0; row < rows; row += kVector) {
    for (int64_t column = 0; column < columns; column += kVector) {
      transpose_block(
          from.part(row, column),
          std::min(kVector, rows - row),
          std::min(kVector, columns - column),
          to.part(column, row));
    }
  }
}

// to = from.T [K, columns], for K in [begin, end), or for pairs of K where the
// elements are Pairs. The columns after the last, up to padded, become zero, as
// packed panels of B need them.
template <typename from_t, typename to_t>
struct Transpose {
  Matrix<const from_t> from;
  int64_t columns;
  int64_t padded;
  Matrix<to_t> to;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    transpose(from.part(0, begin), columns, end - begin, to.part(begin, 0));
    for (int64_t k = begin; columns < padded && k < end; ++k) {
      std::fill(to.row(k) + columns, to.row(k) + padded, to_t{});
    }
  }
};

// to = from, for rows in [begin, end).
template <typename from_t, typename to_t>
struct ConvertRows {
  Matrix<const from_t> from;
  int64_t columns;
  Matrix<to_t> to;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      one_row(from.row(row), to.row(row));
    }
  }

  C10_ALWAYS_INLINE void one_row(
      const from_t* __restrict__ from,
      to_t* __restrict__ to) const {
    for (int64_t i = 0; i < columns; ++i) {
      convert_element(from[i], to[i]);
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
        vectorized<ConvertRows<from_t, to_t>>(
            {{from + begin, 0}, end - begin, {to + begin, 0}}, 0, 1);
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
  Matrix<const scalar_t> from;
  int64_t rows;
  int64_t columns;
  Matrix<gemm_t> to;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    constexpr auto pair = kPair<gemm_t>;
    const auto whole = std::clamp(rows / pair, begin, end);
    if constexpr (pair == 1) {
      ConvertRows<scalar_t, gemm_t>{from, columns, to}(begin, whole);
    } else {
      for (int64_t group = begin; group < whole; ++group) {
        const auto row = group * pair;
        two_rows(from.row(row), from.row(row + 1), to.row(row));
      }
    }
    for (int64_t group = whole; group < end; ++group) {
      const auto row = group * pair;
      rest(from.part(row, 0), std::max<int64_t>(0, rows - row), to.row(row));
    }
  }

  // Copied by the bits, because loops that copy the struct do not vectorise.
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
  rest(Matrix<const scalar_t> from, int64_t rows_left, gemm_t* to) const {
    constexpr auto pair = kPair<gemm_t>;
    for (int64_t i = 0; i < pair; ++i) {
      for (int64_t column = 0; column < columns; ++column) {
        to[column * pair + i] = {};
        if (i < rows_left) {
          convert_element(from.row(i)[column], to[column * pair + i]);
        }
      }
    }
  }
};

} // namespace lltm
