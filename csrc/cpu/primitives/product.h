#pragma once

#include "cpu/primitives/matrix.h"
#include "cpu/primitives/registers.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

// Products on the calling thread.
namespace lltm {

// bfloat16 is multiplied in pairs of terms: a packed B of [K, N] is
// [K / 2, N, 2], with K even.
template <typename T>
constexpr int64_t kPair = std::is_same_v<T, c10::BFloat16> ? 2 : 1;

// C [M, N] = A @ B, or C += A @ B.
template <typename T>
struct Operands {
  int64_t M;
  int64_t N;
  int64_t K;
  Matrix<const T> A;
  Matrix<const T> B;
  Matrix<at::opmath_type<T>> C;
  bool accumulate = false;
  // Adds each sum up in several chains, because one row or two have too few
  // sums to hide the latency of an addition. Only where threads do not divide
  // M: its rounding differs. dot() and oneDNN decide for themselves.
  bool several_chains = false;
};

// In float and double by tiles of our own, in bfloat16 by the microkernels that
// oneDNN generates inside libtorch. B is a panel, or lies as it is; in bfloat16
// it is packed. A result does not depend on how the columns of a product are
// divided; nor on how rows are, without several_chains. The operands come by
// reference: a copy of a Matrix waits until both of its members are stored.
template <typename T>
void multiply(const Operands<T>& operands);
template <>
void multiply(const Operands<c10::BFloat16>& operands);

// Terms of one chain of additions, at most. In float, 512 keep the error below
// twice that of PyTorch's products, and a vector of B stays in L1. The rounding
// of bfloat16 is larger than the error of any chain, and long chains save time.
template <typename T>
constexpr int64_t kTermsOfAChain = kPair<T> == 2 ? 2048 : 512;

// A product is fastest with a multiple of so many columns.
template <typename T>
int64_t column_multiple() {
  return kPair<T> == 2 ? 16 : lanes_of_a_register<T>();
}

// The width of the panels that so many columns are packed in.
template <typename T>
int64_t panel_width(int64_t columns) {
  if (kPair<T> == 2) {
    return std::min<int64_t>(round_up(columns, 16), columns >= 512 ? 64 : 32);
  }
  // A tile takes up to three vectors at once, and is slowest with one.
  const auto vectors = at::divup(columns, column_multiple<T>());
  return std::min<int64_t>(vectors, vectors % 3 == 1 ? 2 : 3) *
      column_multiple<T>();
}

// What product_bfloat16.cpp has for this. Whether this CPU multiplies pairs
// natively, and oneDNN may use it; the terms that it multiplies fast; and the
// release of AMX's tiles, which are a state of the thread.
bool has_bfloat16_product();
int64_t padded_terms_of_pairs(int64_t K);
void release_amx_tiles();

// K, with the zeros that a product needs. Forward needs none, because it
// multiplies pairs only if all sizes are even.
template <typename T>
int64_t padded_terms(int64_t K) {
  return kPair<T> == 2 ? padded_terms_of_pairs(K) : K;
}

// A thread has one while it multiplies, also if a product raises.
template <typename T>
struct ProductGuard {
  ~ProductGuard() {
    if (kPair<T> == 2) {
      release_amx_tiles();
    }
  }
};

// Calls f(gemm_t()) for the type in which scalar_t is multiplied: as pairs, if
// the sizes fit and this CPU does it, or in opmath_t.
template <typename scalar_t, typename F>
void with_gemm_type(bool pairs_fit, const F& f) {
  if constexpr (kPair<scalar_t> == 2) {
    if (pairs_fit && has_bfloat16_product()) {
      return f(scalar_t());
    }
  }
  f(at::opmath_type<scalar_t>());
}

// What the profiler shows of a call: which path it takes.
template <typename gemm_t, typename Plan>
std::string name_of_plan(const Plan& plan) {
  constexpr auto type = c10::CppTypeToScalarType<gemm_t>::value;
  return c10::str("lltm plan: ", type, " products, ", plan.to_string());
}

} // namespace lltm
