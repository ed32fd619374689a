#pragma once

#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace lltm {

// B is packed if A has more rows and more terms than these, so that what tiles
// read lies together.
constexpr int64_t kRowsWorthPacking = 64;
constexpr int64_t kTermsWorthPacking = 32;

// The rows or columns of a block, at most, and its terms. What is read of A
// then takes up to 768 KiB in float, and stays in L2 while all columns pass.
// Several blocks of rows have half as many.
constexpr int64_t kRowsOfABlock = 384;
constexpr int64_t kTermsOfABlock = 512;
// Sums of so many terms are added up, and then added to one another. One chain
// over a batch of 131,072 rows has three times the error of PyTorch's product.
constexpr int64_t kTermsOfASum = 8192;

// to [rows / 2, columns, 2] = from [rows, columns], with zeros beyond the rows.
// begin and end count pairs. Copied by the bits, because loops that copy the
// struct do not vectorise.
struct PairRows {
  Matrix<const c10::BFloat16> from;
  int64_t rows;
  int64_t columns;
  Matrix<c10::BFloat16> to;

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    for (int64_t pair = begin; pair < end; ++pair) {
      const auto row = 2 * pair;
      if (row + 1 < rows) {
        one_pair<true>(from.row(row), from.row(row + 1), to.row(row));
      } else if (row < rows) {
        one_pair<false>(from.row(row), nullptr, to.row(row));
      } else {
        std::fill_n(to.row(row), 2 * columns, c10::BFloat16(0));
      }
    }
  }

 private:
  template <bool kHasSecond>
  C10_ALWAYS_INLINE void one_pair(
      const c10::BFloat16* __restrict__ first,
      const c10::BFloat16* __restrict__ second,
      c10::BFloat16* __restrict__ to_row) const {
    for (int64_t i = 0; i < columns; ++i) {
      to_row[2 * i].x = first[i].x;
      to_row[2 * i + 1].x = kHasSecond ? second[i].x : 0;
    }
  }
};

// Terms of a panel that are packed at a time: an even number, for pairs.
constexpr int64_t kTermsPackedAtOnce = 16;

// Copies terms [begin, end) of so many columns to panels, from a matrix with a
// row for each term. Pairs beyond the last row become zero. Some rows go to all
// panels before the next ones, because processors fetch memory in advance where
// it is read along rows.
template <typename from_t, typename T>
void pack_rows(
    Matrix<const from_t> from,
    int64_t rows,
    int64_t columns,
    int64_t begin,
    int64_t end,
    Panels<T>& panels) {
  for (auto term = begin; term < end; term += kTermsPackedAtOnce) {
    const auto last = std::min(term + kTermsPackedAtOnce, end);
    for (int64_t i = 0; i * panels.width() < columns; ++i) {
      const auto of_panel = from.part(0, i * panels.width());
      const auto size = std::min(panels.width(), columns - i * panels.width());
      if constexpr (kPair<T> == 2) {
        run_with_best_isa(
            PairRows{of_panel, rows, size, panels.panel(i)},
            term / 2,
            last / 2);
      } else {
        run_with_best_isa(
            ConvertRows<from_t, T>{of_panel, size, panels.panel(i)},
            term,
            std::min(last, rows));
      }
    }
  }
}

// The same for all terms and columns, on all threads.
template <typename from_t, typename T>
void pack_rows_on_threads(
    Matrix<const from_t> from,
    int64_t rows,
    Panels<T>& panels) {
  at::parallel_for(
      0,
      at::divup(panels.terms(), kTermsPackedAtOnce),
      grain_size(kTermsPackedAtOnce * panels.columns() / kPackedPerNanosecond),
      [&](int64_t begin, int64_t end) {
        pack_rows(
            from,
            rows,
            panels.columns(),
            begin * kTermsPackedAtOnce,
            std::min(end * kTermsPackedAtOnce, panels.terms()),
            panels);
      });
}

// C [M, N] = A @ B, or C += A @ B, on all threads. A has
// padded_terms(K) columns. C is computed in opmath_t; if out_t is a
// half type, it is then overwritten, and accumulate must be false.
template <typename scalar_t, typename gemm_t, typename out_t>
class ProductOnThreads {
 public:
  struct Operands {
    int64_t M;
    int64_t N;
    int64_t K;
    Matrix<const gemm_t> A;
    Matrix<const scalar_t> B;
    Matrix<out_t> C;
    bool accumulate;
  };

  explicit ProductOnThreads(const Operands& operands)
      : p_(operands),
        terms_(padded_terms<gemm_t>(p_.K)),
        packs_(
            kAlwaysPacks ||
            (p_.M > kRowsWorthPacking && p_.K > kTermsWorthPacking)),
        packs_first_(packs_ && p_.M > kRowsOfABlock),
        rows_(
            p_.M > kRowsOfABlock ? size_of_a_block(p_.M, kRowsOfABlock / 2)
                                 : p_.M),
        tile_(
            kPair<gemm_t> == 2
                ? 16
                : panel_width<gemm_t>(std::max<int64_t>(1, p_.N))),
        columns_(round_up(size_of_a_block(p_.N, kRowsOfABlock), tile_)),
        width_(packs_ && kPair<gemm_t> == 1 ? tile_ : columns_),
        packed_(packs_first_ ? terms_ : 0, p_.N, width_) {}

  void run() {
    if (p_.N == 0) {
      return;
    }
    if (packs_first_) {
      pack_rows_on_threads<scalar_t, gemm_t>(p_.B, p_.K, packed_);
    }
    const auto column_blocks = at::divup(p_.N, columns_);
    at::parallel_for(
        0,
        at::divup(p_.M, rows_) * column_blocks,
        grain_size(2 * terms_ * rows_ * columns_ / kFlopPerNanosecond),
        [&](int64_t begin, int64_t end) {
          const ProductGuard<gemm_t> guard;
          Scratch<opmath_t> sums(
              kInPlace && terms_ <= kTermsOfASum ? 0 : rows_ * columns_);
          Panels<gemm_t> packed_block(
              packs_ && !packs_first_ ? std::min(terms_, kTermsOfABlock) : 0,
              columns_,
              width_);
          for (auto task = begin; task < end; ++task) {
            one_block(
                task / column_blocks * rows_,
                task % column_blocks * columns_,
                packed_block,
                {sums.data(), columns_});
          }
        });
  }

 private:
  using opmath_t = at::opmath_type<out_t>;
  static constexpr bool kInPlace = std::is_same_v<out_t, opmath_t>;
  // To convert, or into pairs.
  static constexpr bool kAlwaysPacks = !std::is_floating_point_v<scalar_t>;

  void one_block(
      int64_t row,
      int64_t column,
      Panels<gemm_t>& packed_block,
      Matrix<opmath_t> sums) const {
    const auto rows = std::min(rows_, p_.M - row);
    const auto columns = std::min(columns_, p_.N - column);
    const auto C = p_.C.part(row, column);
    const auto multiply = [&](int64_t begin, Matrix<opmath_t> to, bool adds) {
      const auto end =
          kInPlace ? std::min(begin + kTermsOfASum, terms_) : terms_;
      for (auto k = begin; k < end; k += kTermsOfABlock) {
        const auto terms = std::min(kTermsOfABlock, end - k);
        if (packs_ && !packs_first_) {
          pack_rows<scalar_t, gemm_t>(
              p_.B.part(k, column), p_.K - k, columns, 0, terms, packed_block);
        }
        for (int64_t j = 0; j < columns; j += width_) {
          lltm::multiply<gemm_t>(
              {.M = rows,
               .N = std::min(width_, columns - j),
               .K = terms,
               .A = p_.A.part(row, k),
               .B = panel_of_B(k, column, j, packed_block),
               .C = to.part(0, j),
               .accumulate = adds || k > begin,
               .several_chains = p_.M <= 2});
        }
      }
    };
    if constexpr (kInPlace) {
      multiply(0, C, p_.accumulate);
      for (auto k = kTermsOfASum; k < terms_; k += kTermsOfASum) {
        multiply(k, sums, false);
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < columns; ++j) {
            C.row(i)[j] += sums.row(i)[j];
          }
        }
      }
    } else { // the rounding of C is larger than the error of any chain
      multiply(0, sums, false);
      run_with_best_isa(
          ConvertRows<opmath_t, out_t>{sums, columns, C}, 0, rows);
    }
  }

  // Columns of B from column j of a block on.
  Matrix<const gemm_t> panel_of_B(
      int64_t k,
      int64_t column,
      int64_t j,
      Panels<gemm_t>& packed_block) const {
    if constexpr (!kAlwaysPacks) {
      if (!packs_) {
        return p_.B.part(k, column + j);
      }
    }
    return packs_first_ ? packed_.panel((column + j) / width_, k)
                        : packed_block.panel(j / width_);
  }

  const Operands& p_;
  const int64_t terms_;
  const bool packs_;
  // All threads pack all panels of B if several blocks of rows use them. Else
  // each is packed where it is used, some terms at a time.
  const bool packs_first_;
  const int64_t rows_; // of a block
  // A panel is as wide as a tile, so what a tile reads of B lies together, in
  // few pages. oneDNN multiplies all columns of a block in one call.
  const int64_t tile_;
  const int64_t columns_; // of a block
  const int64_t width_;   // of a panel
  Panels<gemm_t> packed_;
};

} // namespace lltm
