#pragma once

#include <cstdint>

namespace lltm {

// C [M, N] = A @ B, or C += A @ B, on the calling thread: row-major, with
// leading dimensions in elements, in float or double. K = 0 leaves C as it is
// if accumulate, else zero. How the terms of a sum are grouped depends on
// has_few_rows alone, which is for one or two rows: it is false where they are
// what remains of more, so that a result does not depend on how rows are
// divided.
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
    bool has_few_rows);

} // namespace lltm
