#pragma once

#include "cpu/primitives/gemm.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace lltm {

// Terms that oneDNN's products take, with zeros beyond size: a few numbers, for
// it generates a kernel for each and keeps it.
template <typename gemm_t>
int64_t terms_of(int64_t size) {
  if (size < kVector) {
    return round_up(size, kPair<gemm_t>);
  }
  return padded_terms<gemm_t>(round_up(size, size > kMaxK<gemm_t> ? 32 : 8));
}

// How a product is divided, and by what it is multiplied: oneDNN, or the tile.
struct Blocks {
  bool by_onednn;
  // Each task computes so many rows and columns of the result.
  int64_t rows;
  int64_t columns;
  // So many rows of B are packed at a time.
  int64_t terms;
  // Whether oneDNN takes all rows of a block in one call. It generates a kernel
  // for each number of them, so they must not follow from the batch.
  bool in_one_call = false;
};

// C [M, N] = A @ B, or C += A @ B, on all threads. A has terms_of(K). B is
// packed if it is converted, or multiplied by oneDNN. C is computed in
// opmath_t.
template <typename scalar_t, typename gemm_t, typename out_t>
class ProductOnThreads {
 public:
  ProductOnThreads(
      int64_t M,
      int64_t N,
      int64_t K,
      const gemm_t* A,
      int64_t lda,
      const scalar_t* B,
      int64_t ldb,
      out_t* C,
      int64_t ldc,
      bool accumulate,
      const Blocks& blocks)
      : M_(M),
        N_(N),
        K_(K),
        A_(A),
        lda_(lda),
        B_(B),
        ldb_(ldb),
        C_(C),
        ldc_(ldc),
        accumulate_(accumulate),
        blocks_(blocks),
        packed_(packs_ && row_blocks_ > 1 ? panels_ * width_ * terms_ : 0) {}

  void run() const {
    if (packs_ && row_blocks_ > 1) {
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
              kInPlace ? 0 : blocks_.rows * blocks_.columns);
          const Scratch<gemm_t> panel(
              packs_ && row_blocks_ == 1 ? blocks_.terms * width_ : 0);
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
    vectorized<PackRows<scalar_t, gemm_t>>()(
        {B_ + k * ldb_ + column,
         ldb_,
         K_ - k,
         std::min(blocks_.columns, N_ - column),
         to,
         width_},
        0,
        terms / kPair<gemm_t>);
  }

  void one_block(int64_t row, int64_t panel, opmath_t* sums, gemm_t* scratch)
      const {
    const auto column = panel * blocks_.columns;
    const auto rows = std::min(blocks_.rows, M_ - row);
    const auto columns = std::min(blocks_.columns, N_ - column);
    auto* C = C_ + row * ldc_ + column;
    if constexpr (kInPlace) {
      multiply(row, rows, panel, columns, scratch, C, ldc_);
    } else {
      multiply(row, rows, panel, columns, scratch, sums, columns);
      vectorized<ConvertRows<opmath_t, out_t>>()(
          {sums, columns, columns, C, ldc_}, 0, rows);
    }
  }

  void multiply(
      int64_t row,
      int64_t rows,
      int64_t panel,
      int64_t columns,
      gemm_t* scratch,
      opmath_t* C,
      int64_t ldc) const {
    for (int64_t k = 0; k < terms_; k += blocks_.terms) {
      const auto terms = std::min(blocks_.terms, terms_ - k);
      const auto* A = A_ + row * lda_ + k;
      const bool accumulate = accumulate_ || k > 0;
      const auto* B = block_of_B(panel, k, terms, scratch);
      const auto ldb = packs_ ? width_ : ldb_;
      if constexpr (!std::is_same_v<gemm_t, double>) {
        if (blocks_.by_onednn) {
          gemm(
              rows,
              columns,
              terms,
              A,
              lda_,
              B,
              ldb,
              C,
              ldc,
              accumulate,
              blocks_.in_one_call);
          continue;
        }
      }
      if constexpr (kPair<gemm_t> == 1) {
        lltm::multiply<gemm_t>(
            rows,
            columns,
            terms,
            A,
            lda_,
            B,
            ldb,
            C,
            ldc,
            accumulate,
            M_,
            chain_of(M_, packs_));
      }
    }
  }

  const gemm_t*
  block_of_B(int64_t panel, int64_t k, int64_t terms, gemm_t* scratch) const {
    if constexpr (!kAlwaysPacks) {
      if (!packs_) {
        return B_ + k * ldb_ + panel * blocks_.columns;
      }
    }
    if (row_blocks_ > 1) {
      return packed_.data() + (panel * terms_ + k) * width_;
    }
    pack(panel, k, terms, scratch);
    return scratch;
  }

  const int64_t M_;
  const int64_t N_;
  const int64_t K_;
  const gemm_t* const A_;
  const int64_t lda_;
  const scalar_t* const B_;
  const int64_t ldb_;
  out_t* const C_;
  const int64_t ldc_;
  const bool accumulate_;
  const Blocks blocks_;
  const bool packs_ = kAlwaysPacks || blocks_.by_onednn;
  const int64_t terms_ = blocks_.by_onednn ? terms_of<gemm_t>(K_) : K_;
  const int64_t width_ = round_up(blocks_.columns, kVector);
  const int64_t row_blocks_ = at::divup(M_, blocks_.rows);
  const int64_t panels_ = at::divup(N_, blocks_.columns);
  const Scratch<gemm_t> packed_;
};

} // namespace lltm
