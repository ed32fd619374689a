#include "cpu/primitives/product.h"

#include "cpu/primitives/tile.h"

#include <algorithm>

namespace lltm {

namespace {

template <typename T>
struct Multiply {
  const Operands<T>& p;

  // begin and end count columns of B and C. A few columns pass by all rows
  // before the next ones.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    for (int64_t k = 0; k < p.K; k += kTermsOfAChain<T>) {
      const auto terms = std::min(kTermsOfAChain<T>, p.K - k);
      auto column = begin;
      auto vectors = (end - begin) / Lanes<T, kBytes>::count;
      for (; vectors >= 3; vectors -= 3) {
        column += multiply_columns<kBytes, 3, true>(k, terms, column);
      }
      if (vectors == 2) {
        column += multiply_columns<kBytes, 2, true>(k, terms, column);
      } else if (vectors == 1) {
        column += multiply_columns<kBytes, 1, true>(k, terms, column);
      }
      if (column < end) {
        multiply_columns<kBytes, 1, false>(k, terms, column, end - column);
      }
    }
  }

 private:
  // Some columns by all rows of A.
  template <int64_t kBytes, int64_t kVectors, bool kWhole>
  C10_ALWAYS_INLINE int64_t multiply_columns(
      int64_t k,
      int64_t terms,
      int64_t column,
      int64_t columns = 0) const {
    const auto rows =
        [&]<int64_t kRows>(int64_t row) __attribute__((always_inline)) {
          one<kBytes, kRows, kVectors, kWhole>(row, column, k, terms, columns);
        };
    in_tiles<kTileRows<kBytes, kVectors>>(p.M, rows);
    return kVectors * Lanes<T, kBytes>::count;
  }

  template <int64_t kBytes, int64_t kRows, int64_t kVectors, bool kWhole>
  C10_ALWAYS_INLINE void one(
      int64_t row,
      int64_t column,
      int64_t k,
      int64_t terms,
      int64_t columns = 0) const {
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

template <typename T>
void multiply(const Operands<T>& p) {
  run_with_best_isa(Multiply<T>{p}, 0, p.N);
}
template void multiply(const Operands<float>&);
template void multiply(const Operands<double>&);

} // namespace lltm
