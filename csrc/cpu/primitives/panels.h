#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/registers.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/work.h"

#include <ATen/Parallel.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

// Copies of matrices into the layouts that products take.
namespace lltm {

// Two terms of a column, which are moved as one.
template <typename T>
struct Pair {
  T first;
  T second;
};

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

// to [columns, rows] = from [rows, columns].T. What lies beyond the rows, up to
// padded, becomes zero. begin and end count columns.
template <typename from_t, typename to_t>
struct Transpose {
  Matrix<const from_t> from;
  int64_t rows;
  int64_t padded;
  Matrix<to_t> to;

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    // In blocks, so that the lines of both sides stay in L1.
    constexpr int64_t block = 16;
    for (int64_t row = 0; row < rows; row += block) {
      for (auto column = begin; column < end; column += block) {
        one_block(
            from.part(row, column),
            std::min(block, rows - row),
            std::min(block, end - column),
            to.part(column, row));
      }
    }
    for (auto column = begin; rows < padded && column < end; ++column) {
      std::fill(to.row(column) + rows, to.row(column) + padded, to_t{});
    }
  }

 private:
  // The matrices come by value, because gcc would read members again after each
  // store.
  C10_ALWAYS_INLINE static void one_block(
      Matrix<const from_t> from,
      int64_t rows,
      int64_t columns,
      Matrix<to_t> to) {
    int64_t whole_rows = 0;
    if constexpr (std::is_same_v<from_t, to_t> && sizeof(from_t) == 4) {
      whole_rows = rows / 4 * 4;
      const auto whole_columns = columns / 4 * 4;
      for (int64_t i = 0; i < whole_columns; i += 4) {
        for (int64_t j = 0; j < whole_rows; j += 4) {
          transpose_words(from.part(j, i), to.part(i, j));
        }
      }
      elements(
          from.part(0, whole_columns),
          whole_rows,
          columns - whole_columns,
          to.part(whole_columns, 0));
    }
    if (rows == 16 && columns == 16 && whole_rows == 0) {
      elements(from, 16, 16, to); // gcc makes vectors of this
    } else {
      elements(
          from.part(whole_rows, 0),
          rows - whole_rows,
          columns,
          to.part(0, whole_rows));
    }
  }

  C10_ALWAYS_INLINE static void elements(
      Matrix<const from_t> from,
      int64_t rows,
      int64_t columns,
      Matrix<to_t> to) {
    const auto* __restrict__ from_data = from.data;
    auto* __restrict__ to_data = to.data;
    for (int64_t i = 0; i < columns; ++i) {
      for (int64_t j = 0; j < rows; ++j) {
        convert_element(from_data[j * from.ld + i], to_data[i * to.ld + j]);
      }
    }
  }
};

// The right operand of a product, [terms, columns], in panels of width columns
// that lie one after the other: each is [terms, width], in the type and the
// pairs that multiply() takes.
template <typename T>
class Panels {
 public:
  Panels(int64_t terms, int64_t columns, int64_t width)
      : terms_(padded_terms<T>(terms)),
        columns_(columns),
        width_(width),
        memory_(count() * width * terms_) {}

  int64_t count() const {
    return columns_ == 0 ? 0 : at::divup(columns_, width_);
  }

  int64_t terms() const {
    return terms_;
  }

  int64_t width() const {
    return width_;
  }

  int64_t columns() const {
    return columns_;
  }

  // The columns of a panel that are not padding.
  int64_t columns(int64_t i) const {
    return std::min(width_, columns_ - i * width_);
  }

  // From a term on.
  Matrix<const T> panel(int64_t i, int64_t term = 0) const {
    return {memory_.data() + (i * terms_ + term) * width_, width_};
  }

  Matrix<T> panel(int64_t i, int64_t term = 0) {
    return {memory_.data() + (i * terms_ + term) * width_, width_};
  }

  // Copies a matrix with a row for each column of panel i, and with so many
  // terms. Its first row becomes first_column, its first column first_term.
  // Columns of the panel from columns to padded_columns become zero.
  template <typename from_t>
  void pack_transposed(
      int64_t i,
      int64_t first_column,
      int64_t first_term,
      Matrix<const from_t> from,
      int64_t columns,
      int64_t padded_columns,
      int64_t terms) {
    using P = std::conditional_t<kPair<T> == 2, Pair<from_t>, from_t>;
    using Q = std::conditional_t<kPair<T> == 2, Pair<T>, T>;
    constexpr auto pair = kPair<T>;
    auto* to = panel(i, first_term).data + first_column * pair;
    run_with_best_isa(
        Transpose<P, Q>{
            {reinterpret_cast<const P*>(from.data), from.ld / pair},
            columns,
            padded_columns,
            {reinterpret_cast<Q*>(to), width_}},
        0,
        terms / pair);
  }

 private:
  const int64_t terms_;
  const int64_t columns_;
  const int64_t width_;
  Scratch<T> memory_;
};

} // namespace lltm
