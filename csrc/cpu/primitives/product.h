#pragma once

#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/matrix.h"

#include <ATen/OpMathType.h>

#include <cstdint>

namespace lltm {

// With more rows of A, B is copied, so that what each tile reads lies together
// in L1.
constexpr int64_t kFewRows = 24;
// With so few terms most of the time goes into writing C, so it is written in
// long rows. The tiles read B as it lies, because few of them would read a
// copy.
constexpr int64_t kFewTerms = 64;

// Terms of one chain of additions, at most. So few keep the error below twice
// that of PyTorch's products. 256 terms take 2 % longer at 256x1024x1024 and in
// sequences, on Zen 4.
constexpr int64_t kMaxChain = 512;

// Terms that all of A is multiplied with at a time. Three vectors of B then
// take 24 KB, and so stay in L1: with 256 terms of 64 bytes, 20x128x512x512
// takes 5 % more on the Xeon. Few rows read B as it lies, in long rows of few
// terms, because the processor fetches ahead within a page.
inline int64_t chain_of(int64_t all_rows, bool is_packed) {
  return all_rows <= kFewRows && !is_packed ? 64
      : vector_bytes() == 64                ? 128
                                            : 256;
}

// C [M, N] = A @ B, or C += A @ B. How the terms of a sum are grouped depends
// on all_rows and chain, so a result does not depend on how a product is
// divided.
template <typename A_t, typename B_t = A_t, typename C_t = at::opmath_type<A_t>>
struct Product {
  int64_t M;
  int64_t N;
  int64_t K;
  Matrix<const A_t> A;
  Matrix<const B_t> B;
  Matrix<C_t> C;
  bool accumulate;
  int64_t all_rows = M;      // of the product that these rows are a part of
  int64_t chain = kMaxChain; // terms that are added one after the other
};

// Runs on the calling thread, in float or double, with one term at least. The
// product comes by reference: a copy of a Matrix waits until both of its
// members are stored, and 128x1x128x128 takes 7 % longer on the Xeon.
template <typename T>
void multiply(const Product<T>& product);

} // namespace lltm
