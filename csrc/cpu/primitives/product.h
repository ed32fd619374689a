#pragma once

#include "cpu/primitives/cpu_capability.h"

#include <cstdint>

namespace lltm {

// With more rows of A, B is copied, so that what each tile reads lies together
// in L1.
constexpr int64_t kFewRows = 24;
// With so few terms most of the time is writing C: that goes by long rows. The
// tiles read B as it lies, for a copy would be read by few of them.
constexpr int64_t kFewTerms = 64;

// Terms of one chain of additions, at most. So few keep the error below twice
// that of PyTorch's products; a chain of 768 has 2.5 times their error. With
// 512 the cell at 256x1024x1024 and sequences take 2 % less time than with 256,
// on Zen 4.
constexpr int64_t kMaxChain = 512;

// The chain where all of A is multiplied with three vectors of B at a time,
// which take 24 KB and so stay in L1: with 256 terms of 64 bytes,
// 20x128x512x512 takes 5 % more on the Xeon. Few rows of A take B as it lies,
// and pass over fewer terms in long rows: the processor fetches ahead within a
// page. all_rows: those of the product that the rows of a call are a part of.
inline int64_t chain_of(int64_t all_rows, bool is_packed) {
  return all_rows <= kFewRows && !is_packed ? 64
      : vector_bytes() == 64                ? 128
                                            : 256;
}

// C [M, N] = A @ B, or C += A @ B, on the calling thread: row-major, with
// leading dimensions in elements, in float or double. K = 0 leaves C as it is
// if accumulate, else zero. How the terms of a sum are grouped depends on
// chain, the most that are added one after the other, and on all_rows: so a
// result does not depend on how a product is divided.
template <typename T>
void multiply(
    int64_t M,
    int64_t N,
    int64_t K,
    const T* A,
    int64_t lda,
    const T* B,
    int64_t ldb,
    T* C,
    int64_t ldc,
    bool accumulate,
    int64_t all_rows,
    int64_t chain);

} // namespace lltm
