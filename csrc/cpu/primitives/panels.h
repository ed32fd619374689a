#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/registers.h"
#include "cpu/primitives/work.h"

#include <ATen/Parallel.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

// Copies of matrices into the layouts that products take.
namespace lltm {

template <typename T>
struct Pair {
  T first;
  T second;
};

template <typename from_t, typename to_t>
struct Transpose;

// The right operand of a product, [terms, columns], in panels that lie one
// after the other: each is [terms, width]; pairs are [terms / 2, width, 2].
// Terms beyond the last are zeros if a product reads them, as in backward. What
// the columns beyond the last hold becomes sums that nobody reads.
template <typename T>
class Panels {
  const int64_t terms_; // padded
  const int64_t columns_;
  const int64_t width_;
  Scratch<T> memory_;

 public:
  Panels(int64_t terms, int64_t columns, int64_t width)
      : terms_(padded_terms<T>(terms)),
        columns_(columns),
        width_(width),
        memory_(columns == 0 ? 0 : round_up(columns, width) * terms_) {}

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

  // Copies a matrix [columns, terms] to panel i, from a column and a term of it
  // on. Behind the columns it writes zeros, up to whole squares.
  template <typename from_t>
  void pack_transposed(
      int64_t i,
      int64_t first_column,
      int64_t first_term,
      Matrix<const from_t> from,
      int64_t columns,
      int64_t terms) {
    // A pair of terms is moved as one element.
    constexpr auto pair = kPair<T>;
    using from_element = std::conditional_t<pair == 2, Pair<from_t>, from_t>;
    using to_element = std::conditional_t<pair == 2, Pair<T>, T>;
    auto* to = panel(i, first_term).data + first_column * pair;
    run_with_best_isa(
        Transpose<from_element, to_element>{
            {reinterpret_cast<const from_element*>(from.data), from.ld / pair},
            columns,
            {reinterpret_cast<to_element*>(to), width_}},
        0,
        terms / pair);
  }
};

template <typename lanes_t, int64_t n, size_t... kLane>
void transpose_square(lanes_t (&rows)[n], std::index_sequence<kLane...>);

// to [columns, rows] = from [rows, columns].T, with zeros beyond the rows, up
// to whole squares. begin and end count columns.
template <typename from_t, typename to_t>
struct Transpose {
  Matrix<const from_t> from;
  int64_t rows;
  Matrix<to_t> to;

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    // AVX2 has no instruction that shuffles all of two registers, and squares
    // of 32 would not fit in registers.
    constexpr int64_t bytes = kBytes == 64 ? 64 : 16;
    constexpr int64_t n = std::min<int64_t>(16, bytes / sizeof(to_t));
    // In blocks, so that the lines of both sides stay in L1.
    constexpr int64_t block = 16;
    for (int64_t first_row = 0; first_row < rows; first_row += block) {
      const auto end_row = std::min(first_row + block, rows);
      for (auto first = begin; first < end; first += block) {
        for (auto row = first_row; row < end_row; row += n) {
          for (auto i = first; i < std::min(first + block, end); i += n) {
            // The last square overlaps the one before.
            const auto column = std::max(begin, std::min(i, end - n));
            const auto rows_left = std::min(n, end_row - row);
            const auto columns_left = std::min(n, end - column);
            // Whole squares need no conditions.
            if (rows_left == n && columns_left == n) {
              one_square<n>(from.part(row, column), n, n, to.part(column, row));
            } else {
              one_square<n>(
                  from.part(row, column),
                  rows_left,
                  columns_left,
                  to.part(column, row));
            }
          }
        }
      }
    }
  }

 private:
  // bfloat16, float or a pair, and double
  using word_t = std::conditional_t<
      sizeof(to_t) == 2,
      int16_t,
      std::conditional_t<sizeof(to_t) == 4, float, double>>;

  template <int64_t n>
  C10_ALWAYS_INLINE static void one_square(
      Matrix<const from_t> from,
      int64_t rows,
      int64_t columns,
      Matrix<to_t> to) {
    typename Lanes<word_t, n * sizeof(word_t)>::type square[n] = {};
#pragma GCC unroll 16
    for (int64_t i = 0; i < n; ++i) {
      if (i < rows) {
        load_row(from.row(i), columns, square[i]);
      }
    }
    transpose_square(square, std::make_index_sequence<n>());
#pragma GCC unroll 16
    for (int64_t i = 0; i < n; ++i) {
      if (i < columns) {
        store_lanes(square[i], to.row(i));
      }
    }
  }

  template <typename lanes_t>
  C10_ALWAYS_INLINE static void
  load_row(const from_t* from, int64_t columns, lanes_t& row) {
    constexpr int64_t n = sizeof(row) / sizeof(to_t);
    if constexpr (std::is_same_v<from_t, to_t>) {
      if (columns == n) {
        load_lanes(from, row);
      } else {
        std::memcpy(&row, from, columns * sizeof(to_t));
      }
    } else {
      to_t converted[n] = {};
      convert_elements<sizeof(row)>(from, columns, converted);
      load_lanes(converted, row);
    }
  }
};

// Transposes a square: the words of rows i and i + n / 2 alternate in rows 2 *
// i and 2 * i + 1, log2(n) times.
template <typename lanes_t, int64_t n, size_t... kLane>
C10_ALWAYS_INLINE void transpose_square(
    lanes_t (&rows)[n],
    std::index_sequence<kLane...>) {
#pragma GCC unroll 4
  for (int64_t done = 1; done < n; done *= 2) {
    lanes_t a[n / 2], b[n / 2];
#pragma GCC unroll 8
    for (int64_t i = 0; i < n / 2; ++i) {
      a[i] = rows[i];
      b[i] = rows[i + n / 2];
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < n / 2; ++i) {
      rows[2 * i] = LLTM_SHUFFLE(a[i], b[i], int(kLane % 2 * n + kLane / 2)...);
      rows[2 * i + 1] =
          LLTM_SHUFFLE(a[i], b[i], int(kLane % 2 * n + n / 2 + kLane / 2)...);
    }
  }
}

} // namespace lltm
