#pragma once

#include <cstdint>

namespace lltm {

// With more rows of A, B is copied, so that what each tile reads lies together
// in L1.
constexpr int64_t kFewRows = 24;
// With so few terms most of the time is writing C: that goes by long rows,
// those of two tiles at a time.
constexpr int64_t kFewTerms = 64;

// C [M, N] = A @ B, or C += A @ B, on the calling thread: row-major, with
// leading dimensions in elements, in float or double. K = 0 leaves C as it is
// if accumulate, else zero. How the terms of a sum are grouped depends on
// is_packed, whether B is a packed panel, and on all_rows, those of the product
// that these are a part of: so a result does not depend on how it is divided.
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
    bool is_packed);

} // namespace lltm
