#pragma once

#include "cpu/choices.h"
#include "cpu/primitives/product.h"

#include <ATen/OpMathType.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// Products of blocks, on the calling thread, by the microkernels that oneDNN
// generates inside libtorch.
namespace lltm {

// bfloat16 multiplies pairs: a packed B of [K, N] is [K / 2, N, 2], with K
// even.
template <typename gemm_t>
constexpr int64_t kPair = std::is_same_v<gemm_t, c10::BFloat16> ? 2 : 1;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Terms that operands are padded to with zeros, where they can be.
template <typename gemm_t>
int64_t padded_terms(int64_t terms) {
  return kPair<gemm_t> == 2 ? round_up(terms, terms_of_a_tile()) : terms;
}

// Whether this CPU multiplies bfloat16 natively, and oneDNN may use it. Float
// needs no question: where oneDNN has no kernel, PyTorch takes the BLAS.
bool has_bfloat16_gemm();

// C = A @ B, or C += A @ B. Row-major with leading dimensions in elements.
template <typename gemm_t>
void gemm(
    int64_t M,
    int64_t N,
    int64_t K,
    const gemm_t* A,
    int64_t lda,
    const gemm_t* B,
    int64_t ldb,
    at::opmath_type<gemm_t>* C,
    int64_t ldc,
    bool accumulate) {
  if constexpr (std::is_same_v<gemm_t, double>) {
    // oneDNN has none for float64, and libtorch does not export its BLAS.
    multiply<double>(M, N, K, A, lda, B, ldb, C, ldc, accumulate, M, true);
  } else {
    const auto whole = K / terms_of_a_tile() * terms_of_a_tile();
    const auto first =
        kPair<gemm_t> == 2 && K >= kTermsWorthTwoProducts ? whole : K;
    at::native::cpublas::brgemm(
        M, N, first, lda, ldb, ldc, accumulate, A, B, C, kPair<gemm_t> == 2);
    if (first < K) {
      at::native::cpublas::brgemm(
          M,
          N,
          K - first,
          lda,
          ldb,
          ldc,
          true,
          A + first,
          B + first * ldb,
          C,
          kPair<gemm_t> == 2);
    }
  }
}

// Rows of C for a call, of those that remain.
inline int64_t rows_of_block(int64_t remaining) {
  return remaining < kVector
      ? remaining
      : std::min(kMaxRowsOfACall, remaining / kVector * kVector);
}

// To be called by a thread after its last gemm: AMX tiles are a state of the
// thread.
template <typename gemm_t>
void release_gemm() {
  if constexpr (kPair<gemm_t> == 2) {
    at::native::cpublas::brgemm_release();
  }
}

} // namespace lltm
