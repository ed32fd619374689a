#include "cpu/primitives/product.h"

#include "cpu/primitives/tile.h"

#include <algorithm>

namespace lltm {

namespace {

// Vectors of a tile of long rows. With AVX2, 6 leave no register for B.
template <int64_t kBytes>
constexpr int64_t kVectorsOfLongRows = kHasManyRegisters<kBytes> ? 6 : 3;

template <typename T>
struct Multiply {
  const Product<T>& p;

  // begin and end count columns of B and C. If terms are few, a tile's rows
  // get all their columns before the next rows, else a panel of columns all its
  // rows.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    if (p.K <= kFewTerms) {
      return long_rows<kBytes>(begin, end);
    }
    for (int64_t k = 0; k < p.K; k += p.kTermsOfAChain) {
      const auto terms = std::min(p.kTermsOfAChain, p.K - k);
      auto column = begin;
      auto vectors = (end - begin) / Lanes<T, kBytes>::count;
      // 4 are two panels of 2, because a panel of 1 is the slowest.
      for (; vectors >= 3 && vectors != 4; vectors -= 3) {
        column += panel<kBytes, 3, true>(k, terms, column);
      }
      for (; vectors >= 2; vectors -= 2) {
        column += panel<kBytes, 2, true>(k, terms, column);
      }
      if (vectors == 1) {
        column += panel<kBytes, 1, true>(k, terms, column);
      }
      if (column < end) {
        panel<kBytes, 1, false>(k, terms, column, end - column);
      }
    }
  }

 private:
  // Some rows of A by all columns.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void long_rows(int64_t begin, int64_t end) const {
    constexpr auto lanes = Lanes<T, kBytes>::count;
    constexpr auto most = kVectorsOfLongRows<kBytes>;
    // The last vector may overlap the one before, unless an overlap would be
    // added twice.
    const bool overlaps = !p.accumulate && end - begin >= lanes;
    const auto rows = [&]<int64_t kRows>(
                          int64_t row) __attribute__((always_inline)) {
      auto column = begin;
      for (; column + most * lanes <= end; column += most * lanes) {
        one<kBytes, kRows, most, true>(row, column, 0, p.K);
      }
      for (; column + 2 * lanes <= end; column += 2 * lanes) {
        one<kBytes, kRows, 2, true>(row, column, 0, p.K);
      }
      for (; column + (overlaps ? 1 : lanes) <= end; column += lanes) {
        one<kBytes, kRows, 1, true>(row, std::min(column, end - lanes), 0, p.K);
      }
      if (column < end) {
        one<kBytes, kRows, 1, false>(row, column, 0, p.K, end - column);
      }
    };
    in_tiles<kTileRows<kBytes, most>>(p.M, rows);
  }

  // Some columns by all rows of A.
  template <int64_t kBytes, int64_t kVectors, bool kWhole>
  C10_ALWAYS_INLINE int64_t
  panel(int64_t k, int64_t terms, int64_t column, int64_t columns = 0) const {
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
void multiply(const Product<T>& p) {
  vectorized(Multiply<T>{p}, 0, p.N);
}
template void multiply(const Product<float>&);
template void multiply(const Product<double>&);

} // namespace lltm
