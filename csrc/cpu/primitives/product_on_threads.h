#pragma once

#include "cpu/primitives/gemm.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace lltm {

// Sums of so many terms are added up, and then added to one another. One chain
// over a batch of 131,072 rows has three times the error of PyTorch's product.
constexpr int64_t kTermsOfASum = 8192;

// How a product is divided, and by which code it is multiplied.
struct Blocks {
  Method method;
  // Each task computes so many rows and columns of the result.
  int64_t rows;
  int64_t columns;
  // So many rows of B are packed at a time.
  int64_t terms;
};

// A product on all threads. If oneDNN multiplies, A has terms_of(K) columns,
// which are zero beyond K. B is packed if it is converted or oneDNN multiplies.
// C is computed in opmath_t, and products add up in it only if that is out_t.
template <typename scalar_t, typename gemm_t, typename out_t>
class ProductOnThreads {
 public:
  ProductOnThreads(
      const Product<gemm_t, scalar_t, out_t>& product,
      const Blocks& blocks)
      : p_(product),
        blocks_(blocks),
        packed_(packs_first_ ? panels_ * width_ * terms_ : 0) {}

  void run() const {
    if (packs_first_) {
      at::parallel_for(
          0,
          panels_,
          grain_size(terms_ * width_ / kPackedPerNanosecond),
          [&](int64_t begin, int64_t end) {
            for (auto panel = begin; panel < end; ++panel) {
              pack(panel, 0, terms_, packed_.data() + panel * width_ * terms_);
            }
          });
    }
    const auto nanoseconds = std::max<int64_t>(2 * terms_, 20) * blocks_.rows *
        blocks_.columns / kFlopPerNanosecond;
    at::parallel_for(
        0,
        row_blocks_ * panels_,
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          const Scratch<opmath_t> sums(
              kInPlace && terms_ <= kTermsOfASum
                  ? 0
                  : blocks_.rows * blocks_.columns);
          const Scratch<gemm_t> panel(
              packs_ && !packs_first_ ? blocks_.terms * width_ : 0);
          for (auto task = begin; task < end; ++task) {
            one_block(
                task / panels_ * blocks_.rows,
                task % panels_,
                sums.data(),
                panel.data());
          }
          release_gemm<gemm_t>();
        });
  }

 private:
  using opmath_t = at::opmath_type<out_t>;
  static constexpr bool kInPlace = std::is_same_v<out_t, opmath_t>;
  static constexpr bool kAlwaysPacks =
      !std::is_same_v<scalar_t, gemm_t> || kPair<gemm_t> == 2;

  void pack(int64_t panel, int64_t k, int64_t terms, gemm_t* to) const {
    const auto column = panel * blocks_.columns;
    vectorized<PackRows<scalar_t, gemm_t>>(
        {.from = p_.B.part(k, column),
         .rows = p_.K - k,
         .columns = std::min(blocks_.columns, p_.N - column),
         .to = {to, width_}},
        0,
        terms / kPair<gemm_t>);
  }

  void one_block(int64_t row, int64_t panel, opmath_t* sums, gemm_t* scratch)
      const {
    const auto column = panel * blocks_.columns;
    const auto rows = std::min(blocks_.rows, p_.M - row);
    const auto columns = std::min(blocks_.columns, p_.N - column);
    const auto C = p_.C.part(row, column);
    const auto multiply = [&](int64_t first, int64_t end, auto to, bool adds) {
      multiply_terms(row, rows, panel, columns, first, end, scratch, to, adds);
    };
    const Matrix<opmath_t> sum{sums, columns};
    if constexpr (kInPlace) {
      multiply(0, std::min(kTermsOfASum, terms_), C, p_.accumulate);
      for (auto k = kTermsOfASum; k < terms_; k += kTermsOfASum) {
        multiply(k, std::min(k + kTermsOfASum, terms_), sum, false);
        add(sum, rows, columns, C);
      }
    } else {
      // The rounding of the result is larger than the error of any chain.
      multiply(0, terms_, sum, false);
      vectorized<ConvertRows<opmath_t, out_t>>({sum, columns, C}, 0, rows);
    }
  }

  void multiply_terms(
      int64_t row,
      int64_t rows,
      int64_t panel,
      int64_t columns,
      int64_t first_term,
      int64_t end_term,
      gemm_t* scratch,
      Matrix<opmath_t> C,
      bool accumulate) const {
    for (auto k = first_term; k < end_term; k += blocks_.terms) {
      const auto terms = std::min(blocks_.terms, end_term - k);
      gemm<gemm_t>(
          blocks_.method,
          {.M = rows,
           .N = columns,
           .K = terms,
           .A = p_.A.part(row, k),
           .B = block_of_B(panel, k, terms, scratch),
           .C = C,
           .accumulate = accumulate || k > first_term,
           .all_rows = p_.M,
           .chain = chain_of(p_.M, packs_)});
    }
  }

  static void
  add(Matrix<opmath_t> from, int64_t rows, int64_t columns, Matrix<out_t> to) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        to.row(row)[column] += from.row(row)[column];
      }
    }
  }

  Matrix<const gemm_t>
  block_of_B(int64_t panel, int64_t k, int64_t terms, gemm_t* scratch) const {
    if constexpr (!kAlwaysPacks) {
      if (!packs_) {
        return p_.B.part(k, panel * blocks_.columns);
      }
    }
    if (packs_first_) {
      return {packed_.data() + (panel * terms_ + k) * width_, width_};
    }
    pack(panel, k, terms, scratch);
    return {scratch, width_};
  }

  const Product<gemm_t, scalar_t, out_t> p_;
  const Blocks blocks_;
  const bool packs_ = kAlwaysPacks || blocks_.method != Method::kTile;
  const int64_t terms_ =
      blocks_.method == Method::kTile ? p_.K : terms_of<gemm_t>(p_.K);
  const int64_t width_ = round_up(blocks_.columns, kVector);
  const int64_t row_blocks_ = at::divup(p_.M, blocks_.rows);
  // Packs all panels, because several blocks of rows use them.
  const bool packs_first_ = packs_ && row_blocks_ > 1;
  const int64_t panels_ = at::divup(p_.N, blocks_.columns);
  const Scratch<gemm_t> packed_;
};

} // namespace lltm
