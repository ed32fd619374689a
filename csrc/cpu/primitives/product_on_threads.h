#pragma once

#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace lltm {

// B is packed if A has more rows, and B more than kFewTerms, so that what tiles
// read lies together.
constexpr int64_t kRowsWorthPacking = 24;

// The rows or columns of a block, at most, and its terms. What is read of A
// then takes up to 768 KiB in float, and stays in L2 while all columns pass.
// Several blocks of rows have half as many.
constexpr int64_t kMostRowsOfABlock = 384;
constexpr int64_t kMostTermsOfABlock = 512;
// Sums of so many terms are added up, and then added to one another. One chain
// over a batch of 131,072 rows has three times the error of PyTorch's product.
constexpr int64_t kTermsOfASum = 8192;

// C [M, N] = A @ B, or C += A @ B, on all threads. A has
// Product::padded_terms(K) columns. C is computed in opmath_t; if out_t is a
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
      : p_(operands), packed_(packs_first_ ? terms_ : 0, p_.N, width_) {}

  void run() const {
    if (p_.N == 0) {
      return;
    }
    if (packs_first_) {
      packed_.pack_on_threads(p_.B, p_.K);
    }
    const auto column_blocks = at::divup(p_.N, columns_);
    at::parallel_for(
        0,
        at::divup(p_.M, rows_) * column_blocks,
        grain_size(2 * terms_ * rows_ * columns_ / kFlopPerNanosecond),
        [&](int64_t begin, int64_t end) {
          const typename Product<gemm_t>::Guard guard;
          const Scratch<opmath_t> sums(
              kInPlace && terms_ <= kTermsOfASum ? 0 : rows_ * columns_);
          const Panels<gemm_t> packed_block(
              packs_ && !packs_first_ ? std::min(terms_, kMostTermsOfABlock)
                                      : 0,
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
      const Panels<gemm_t>& packed_block,
      Matrix<opmath_t> sums) const {
    const auto rows = std::min(rows_, p_.M - row);
    const auto columns = std::min(columns_, p_.N - column);
    const auto C = p_.C.part(row, column);
    const auto multiply = [&](int64_t begin, Matrix<opmath_t> to, bool adds) {
      const auto end =
          kInPlace ? std::min(begin + kTermsOfASum, terms_) : terms_;
      for (auto k = begin; k < end; k += kMostTermsOfABlock) {
        const auto terms = std::min(kMostTermsOfABlock, end - k);
        if (packs_ && !packs_first_) {
          packed_block.pack(p_.B.part(k, column), p_.K - k, columns, 0, terms);
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
      vectorized(ConvertRows<opmath_t, out_t>{sums, columns, C}, 0, rows);
    }
  }

  // Columns of B from column j of a block on.
  Matrix<const gemm_t> panel_of_B(
      int64_t k,
      int64_t column,
      int64_t j,
      const Panels<gemm_t>& packed_block) const {
    if constexpr (!kAlwaysPacks) {
      if (!packs_) {
        return p_.B.part(k, column + j);
      }
    }
    return packs_first_ ? packed_.panel((column + j) / width_, k)
                        : packed_block.panel(j / width_);
  }

  const Operands& p_;
  const int64_t terms_ = Product<gemm_t>::padded_terms(p_.K);
  const bool packs_ =
      kAlwaysPacks || (p_.M > kRowsWorthPacking && p_.K > kFewTerms);
  // All threads pack all panels of B if several blocks of rows use them. Else
  // each is packed where it is used, some terms at a time.
  const bool several_blocks_ = p_.M > kMostRowsOfABlock;
  const bool packs_first_ = packs_ && several_blocks_;
  const int64_t rows_ =
      several_blocks_ ? size_of_a_block(p_.M, kMostRowsOfABlock / 2) : p_.M;
  // A panel is as wide as a tile, so what a tile reads of B lies together, in
  // few pages: with AVX2, 256x1024x1024 takes 11 % less time. oneDNN multiplies
  // all columns of a block in one call.
  const int64_t tile_ = Product<gemm_t>::kPairs
      ? 16
      : Product<gemm_t>::panel_width(std::max<int64_t>(1, p_.N));
  const int64_t columns_ =
      round_up(size_of_a_block(p_.N, kMostRowsOfABlock), tile_);
  const int64_t width_ = packs_ && !Product<gemm_t>::kPairs ? tile_ : columns_;
  const Panels<gemm_t> packed_;
};

} // namespace lltm
