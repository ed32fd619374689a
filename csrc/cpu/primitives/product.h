#pragma once

#include "cpu/primitives/matrix.h"
#include "cpu/primitives/registers.h"

#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

namespace lltm {

// With so few terms most of the time goes into writing C, so it is written in
// long rows.
constexpr int64_t kFewTerms = 32;

// C [M, N] = A @ B, or C += A @ B, on the calling thread, in float or double.
// B is a panel, or lies as it is. A result does not depend on how the columns
// of a product are divided; nor on how rows are, without several_chains.
template <typename T>
struct Product {
  int64_t M;
  int64_t N;
  int64_t K;
  Matrix<const T> A;
  Matrix<const T> B;
  Matrix<T> C;
  bool accumulate;
  // One row or two have too few sums to hide the latency of an addition, so
  // each sum has several chains.
  bool several_chains = M <= 2;

  // Terms of one chain of additions, at most. So few keep the error below twice
  // that of PyTorch's products, and a vector of B stays in L1.
  static constexpr int64_t kTermsOfAChain = 512;

  // K, with the zeros that a product needs.
  static int64_t padded_terms(int64_t K) {
    return K;
  }

  // A product is fastest with a multiple of so many columns.
  static int64_t column_multiple() {
    return lanes_of_a_register<T>();
  }

  // The width of the panels that so many columns are packed in. The tile takes
  // up to three vectors at once, and is slowest with one.
  static int64_t panel_width(int64_t size) {
    const auto vectors = (size + column_multiple() - 1) / column_multiple();
    return std::min<int64_t>(vectors, vectors % 3 == 1 ? 2 : 3) *
        column_multiple();
  }

  // A thread has one while it multiplies.
  struct Guard {
    ~Guard() {} // not trivial: an unused variable would be a warning
  };
};

// The product comes by reference: a copy of a Matrix waits until both of its
// members are stored, and 128x1x128x128 takes 7 % longer on the Xeon.
template <typename T>
void multiply(const Product<T>& product);

} // namespace lltm
