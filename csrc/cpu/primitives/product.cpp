#include "cpu/primitives/product.h"

#include "cpu/primitives/tile.h"

#include <algorithm>

// multiply() in float and double: for some terms, a few vectors of columns pass
// by all rows before the next ones.
namespace lltm {

namespace {

template <typename T>
struct Multiply;

} // namespace

template <typename T>
void multiply(const Operands<T>& p) {
  for (int64_t k = 0; k < p.K; k += kTermsOfAChain<T>) {
    const auto terms = std::min(kTermsOfAChain<T>, p.K - k);
    run_with_best_isa(Multiply<T>{p, k, terms}, 0, p.N);
  }
}

namespace {

// A body for run_with_best_isa().
template <typename T>
struct Multiply {
  const Operands<T>& p;
  int64_t k; // the first of these terms
  int64_t terms;

  // begin and end count columns of B and C.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr auto lanes = Lanes<T, kBytes>::count;
    auto column = begin;
    for (; end - column >= 3 * lanes; column += 3 * lanes) {
      multiply_columns<kBytes, 3, true>(column, 3 * lanes);
    }
    if (end - column >= 2 * lanes) {
      multiply_columns<kBytes, 2, true>(column, 2 * lanes);
      column += 2 * lanes;
    } else if (end - column >= lanes) {
      multiply_columns<kBytes, 1, true>(column, lanes);
      column += lanes;
    }
    if (column < end) {
      multiply_columns<kBytes, 1, false>(column, end - column);
    }
  }

 private:
  template <int64_t kBytes, int64_t kVectors, bool kWhole>
  C10_ALWAYS_INLINE void multiply_columns(int64_t column, int64_t columns)
      const {
    const auto multiply_rows =
        [&]<int64_t kRows>(int64_t row) __attribute__((always_inline)) {
          multiply_tile<kBytes, kRows, kVectors, kWhole>(row, column, columns);
        };
    in_tiles<kTileRows<kBytes, kVectors>>(p.M, multiply_rows);
  }

  template <int64_t kBytes, int64_t kRows, int64_t kVectors, bool kWhole>
  C10_ALWAYS_INLINE void
  multiply_tile(int64_t row, int64_t column, int64_t columns) const {
    const auto A = p.A.part(row, k);
    const auto B = p.B.part(k, column);
    const auto C = p.C.part(row, column);
    const bool accumulate = p.accumulate || k > 0;
    if constexpr (kRows <= 2) {
      if (p.several_chains) {
        return tile<T, kBytes, kRows, kVectors, 4 / kRows, kWhole>(
            terms, A, B, C, columns, accumulate);
      }
    }
    tile<T, kBytes, kRows, kVectors, 1, kWhole>(
        terms, A, B, C, columns, accumulate);
  }
};

} // namespace

template void multiply(const Operands<float>&);
template void multiply(const Operands<double>&);

} // namespace lltm
