#pragma once

#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/product.h"

#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// Products of blocks, on the calling thread: by the tile, or by the
// microkernels that oneDNN generates inside libtorch. gemm_t is the type of the
// operands: scalar_t where the processor multiplies it, else opmath_t.
namespace lltm {

// The columns of B in a vector of the microkernel, on every processor. Blocks,
// and the panels that oneDNN multiplies, have a multiple of so many columns. A
// register, by which the tile counts, may hold fewer.
constexpr int64_t kVector = 16;

// Terms of a call, which are one chain of additions. In bfloat16 the rounding
// of inputs and results is larger than the error of any chain, and long chains
// save time: 17 % at 32x1024x1024 on the Xeon, with 2048 in place of 512.
template <typename gemm_t>
constexpr int64_t kMaxK = sizeof(gemm_t) == 2 ? 2048 : kMaxChain;

// Terms that AMX multiplies at a time; other products take pairs of bfloat16.
// On the Xeon oneDNN's products are fastest for whole tiles of AMX, at 2000
// GFLOP/s.
// For some other sizes, like 388 and 556, they are six times as slow.
inline int64_t terms_of_an_amx_tile() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has_amx = __builtin_cpu_supports("amx-bf16");
  return has_amx ? 32 : 2;
#else
  return 2;
#endif
}

// With so many terms or more, those beyond whole tiles of AMX are a product of
// their own. Where terms_of() has padded the operands, there are none. In
// bfloat16 512x256x300 takes 43 % less time on the Xeon. With fewer terms it
// takes longer.
constexpr int64_t kTermsWorthTwoProducts = 384;

// Rows of C in a call, of those that remain. There are few such sizes, because
// oneDNN generates a kernel for each.
inline int64_t rows_of_a_call(int64_t left) {
  constexpr int64_t most = 128;
  return left < kVector ? left : std::min(most, left / kVector * kVector);
}

// bfloat16 multiplies pairs: a packed B of [K, N] is [K / 2, N, 2], with K
// even.
template <typename gemm_t>
constexpr int64_t kPair = std::is_same_v<gemm_t, c10::BFloat16> ? 2 : 1;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Whether oneDNN may run what it generates. A hardened system refuses that, and
// PyTorch's brgemm would then call a kernel that was not made.
bool may_run_generated_code();

// Whether this CPU multiplies bfloat16 natively, and oneDNN may use it. Float
// needs no such check: if oneDNN has no kernel, PyTorch takes the BLAS.
bool has_bfloat16_gemm();

// Whether oneDNN multiplies faster than the tile. Only oneDNN takes pairs. With
// AVX-512 it is also ahead in float32: on the Xeon the tile would take 5 to 10
// % longer in backward of large shapes, and 20 to 30 % in forward of 16 rows.
template <typename gemm_t>
bool is_onednn_faster() {
  return kPair<gemm_t> == 2 ||
      (std::is_same_v<gemm_t, float> &&
       cpu_capability() == CPUCapability::kAVX512 && may_run_generated_code());
}

// Terms that oneDNN's products take, with zeros beyond size. There are few such
// numbers, because oneDNN generates a kernel for each and keeps it.
template <typename gemm_t>
int64_t terms_of(int64_t size) {
  if (size < kVector) {
    return round_up(size, kPair<gemm_t>);
  }
  const int64_t least = size > kMaxK<gemm_t> ? 32 : 8;
  return round_up(
      size,
      kPair<gemm_t> == 2 ? std::max(least, terms_of_an_amx_tile()) : least);
}

// Terms of a call, of those that remain.
template <typename gemm_t>
int64_t terms_of_a_call(int64_t left) {
  const auto terms = std::min(left, kMaxK<gemm_t>);
  return kPair<gemm_t> == 2 && terms >= kTermsWorthTwoProducts
      ? terms / terms_of_an_amx_tile() * terms_of_an_amx_tile()
      : terms;
}

// How a block is multiplied: by the tile, or by oneDNN in calls of some rows or
// of all. If of all, the number of rows takes few values as the batch changes,
// because oneDNN generates a kernel for each.
enum class Method { kTile, kOneDNN, kOneDNNInOneCall };

template <typename gemm_t>
void onednn_gemm(const Product<gemm_t>& p, bool in_one_call) {
  for (int64_t k = 0, terms = 0; k < p.K; k += terms) {
    terms = terms_of_a_call<gemm_t>(p.K - k);
    for (int64_t row = 0, rows = 0; row < p.M; row += rows) {
      rows = in_one_call ? p.M : rows_of_a_call(p.M - row);
      at::native::cpublas::brgemm(
          rows,
          p.N,
          terms,
          p.A.ld,
          p.B.ld,
          p.C.ld,
          p.accumulate || k > 0,
          p.A.row(row) + k,
          p.B.row(k),
          p.C.row(row),
          kPair<gemm_t> == 2);
    }
  }
}

// On the calling thread.
template <typename gemm_t>
void gemm(Method method, const Product<gemm_t>& product) {
  if constexpr (kPair<gemm_t> == 1) {
    if (method == Method::kTile) {
      return multiply(product);
    }
  }
  if constexpr (!std::is_same_v<gemm_t, double>) {
    onednn_gemm(product, method == Method::kOneDNNInOneCall);
  }
}

// A thread calls this after its last gemm, because AMX tiles are a state of the
// thread.
template <typename gemm_t>
void release_gemm() {
  if constexpr (kPair<gemm_t> == 2) {
    at::native::cpublas::brgemm_release();
  }
}

} // namespace lltm
