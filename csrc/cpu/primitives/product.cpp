#include "cpu/primitives/product.h"

#include "cpu/primitives/lanes.h"
#include "cpu/primitives/tile.h"
#include "cpu/primitives/vectorize.h"

#include <algorithm>
#include <cstring>

namespace lltm {

namespace {

// Terms of B that are copied at a time, at most: they lie on the stack.
constexpr int64_t kCopiedTerms = 256;
// With so many rows of A a tile prefetches its share of the part of B that is
// copied next, because its rows may lie too far apart for the processor to do
// so. With fewer rows prefetching takes as long as waiting.
constexpr int64_t kRowsWorthFetching = 64;
// Up to so many terms, a panel of C gets all its terms before the next panel,
// and each panel reads all of A. With more, all panels take the terms of one
// chain, for which A stays in L2.
constexpr int64_t kTermsOfWholePanels = 512;

// Vectors of a tile of long rows. With AVX2, 6 leave no register for B.
template <int64_t kBytes>
constexpr int64_t kVectorsOfLongRows = kHasManyRegisters<kBytes> ? 6 : 3;

template <typename T>
struct Multiply {
  const Product<T>& p;

  // begin and end count columns of B and C. Products of few terms are written
  // in long rows. Panels compute the columns that are left, and all other
  // products.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr auto lanes = Lanes<T, kBytes>::count;
    if (p.K <= kFewTerms && p.all_rows > kFewRows) {
      const bool overlaps = !p.accumulate && end - begin >= lanes;
      const auto last = overlaps ? end : end - (end - begin) % lanes;
      in_tiles<kTileRows<kBytes, kVectorsOfLongRows<kBytes>>>(
          p.M, LongRows<kBytes>{p, begin, last});
      begin = last;
    }
    // Whether a panel gets all its terms before the next panel. M may decide,
    // because sums are grouped alike in both orders.
    const bool by_panels = p.M > kFewRows && p.K <= kTermsOfWholePanels;
    const auto terms = by_panels ? p.K : p.chain;
    for (int64_t k = 0; k < p.K && begin < end; k += terms) {
      panels<kBytes>(k, std::min(k + terms, p.K), begin, end);
    }
  }

 private:
  // The columns of a tile's rows, in whole vectors. The last one may overlap
  // the one before, unless an overlap would be added twice.
  template <int64_t kBytes>
  struct LongRows {
    const Product<T>& p;
    int64_t begin; // columns
    int64_t end;

    template <int64_t kRows>
    C10_ALWAYS_INLINE void rows(int64_t row) const {
      constexpr auto lanes = Lanes<T, kBytes>::count;
      auto column = begin;
      constexpr auto vectors = kVectorsOfLongRows<kBytes>;
      for (; column + vectors * lanes <= end; column += vectors * lanes) {
        one<kRows, vectors>(row, column);
      }
      for (; column + 2 * lanes <= end; column += 2 * lanes) {
        one<kRows, 2>(row, column);
      }
      for (; column < end; column += lanes) {
        one<kRows, 1>(row, std::min(column, end - lanes));
      }
    }

    template <int64_t kRows, int64_t kVectors>
    C10_ALWAYS_INLINE void one(int64_t row, int64_t column) const {
      tile<T, kBytes, kRows, kVectors, 1>(
          p.K,
          p.A.part(row, 0),
          p.B.part(0, column),
          p.C.part(row, column),
          p.accumulate);
    }
  };

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void panels(
      int64_t first_term,
      int64_t end_term,
      int64_t begin,
      int64_t end) const {
    constexpr auto lanes = Lanes<T, kBytes>::count;
    auto column = begin;
    auto vectors = (end - begin) / lanes;
    for (; vectors >= 3 && vectors != 4; vectors -= 3) {
      panel<kBytes, 3>(first_term, end_term, column, 3 * lanes);
      column += 3 * lanes;
    }
    // 4 are two panels of 2, because a panel of 1 is the slowest.
    for (; vectors >= 2; vectors -= 2) {
      panel<kBytes, 2>(first_term, end_term, column, 2 * lanes);
      column += 2 * lanes;
    }
    for (; column < end; column += lanes) {
      panel<kBytes, 1>(
          first_term, end_term, column, std::min(lanes, end - column));
    }
  }

  template <int64_t kBytes, int64_t kVectors>
  C10_ALWAYS_INLINE void panel(
      int64_t first_term,
      int64_t end_term,
      int64_t column,
      int64_t columns) const {
    constexpr auto width = kVectors * Lanes<T, kBytes>::count;
    alignas(64) T copied[kCopiedTerms * width];
    const Matrix<T> copy{copied, width};
    // Decided by all rows, not by those of this call, because copied terms are
    // added in shorter chains. A packed panel lies together already.
    const bool copies =
        columns < width || (p.all_rows > kFewRows && p.B.ld > width);
    const bool fetches = copies && p.M >= kRowsWorthFetching;
    const auto most = copies ? std::min(p.chain, kCopiedTerms) : p.chain;
    for (auto k = first_term; k < end_term; k += most) {
      const auto terms = std::min(most, end_term - k);
      const auto from = p.B.part(k, column);
      if (copies) {
        copy_columns(from, terms, columns, copy);
      }
      const auto next = k + terms < end_term
          ? from.part(terms, 0)
          : p.B.part(first_term, column + width);
      in_tiles<kTileRows<kBytes, kVectors>>(
          p.M,
          Tiles<kBytes, kVectors>{
              .p = p,
              .k = k,
              .terms = terms,
              .B = copies ? Matrix<const T>(copy) : from,
              .column = column,
              .columns = columns,
              .next = fetches ? next : Matrix<const T>{}});
    }
  }

  C10_ALWAYS_INLINE void copy_columns(
      Matrix<const T> from,
      int64_t terms,
      int64_t columns,
      Matrix<T> to) const {
    for (int64_t term = 0; term < terms; ++term) {
      if (columns == to.ld) {
        std::memcpy(to.row(term), from.row(term), to.ld * sizeof(T));
      } else {
        std::memcpy(to.row(term), from.row(term), columns * sizeof(T));
        std::fill(to.row(term) + columns, to.row(term + 1), T(0));
      }
    }
  }

  template <int64_t kBytes, int64_t kVectors>
  struct Tiles {
    const Product<T>& p;
    int64_t k;
    int64_t terms;
    Matrix<const T> B;
    int64_t column;
    int64_t columns;
    Matrix<const T> next; // what is copied next; null: nothing

    C10_ALWAYS_INLINE void fetch(int64_t row, int64_t rows) const {
      if (next.data == nullptr) {
        return;
      }
      constexpr auto width = kVectors * Lanes<T, kBytes>::count;
      const auto end = (row + rows) * terms / p.M;
      for (auto term = row * terms / p.M; term < end; ++term) {
        for (int64_t i = 0; i < width; i += 64 / sizeof(T)) {
          __builtin_prefetch(next.row(term) + i, 0, 2);
        }
      }
    }

    // in_tiles() calls this with the rows of each tile.
    template <int64_t kRows>
    C10_ALWAYS_INLINE void rows(int64_t row) const {
      fetch(row, kRows);
      constexpr auto width = kVectors * Lanes<T, kBytes>::count;
      const auto A = p.A.part(row, k);
      const auto C = p.C.part(row, column);
      const bool accumulate = p.accumulate || k > 0;
      if (columns == width) {
        return one<kRows>(A, C, accumulate);
      }
      if constexpr (kVectors == 1) {
        alignas(64) T sums[kRows * width];
        one<kRows>(A, {sums, width}, false);
        for (int64_t i = 0; i < kRows; ++i) {
          for (int64_t j = 0; j < columns; ++j) {
            auto& c = C.row(i)[j];
            c = accumulate ? c + sums[i * width + j] : sums[i * width + j];
          }
        }
      }
    }

    // An addition takes four cycles and two begin in each, so eight must be
    // under way. One or two rows have too few sums, so each sum has chains.
    template <int64_t kRows>
    C10_ALWAYS_INLINE void one(Matrix<const T> A, Matrix<T> C, bool accumulate)
        const {
      if constexpr (kRows <= 2) {
        if (p.all_rows <= 2) {
          return tile<T, kBytes, kRows, kVectors, 4 / kRows>(
              terms, A, B, C, accumulate);
        }
      }
      tile<T, kBytes, kRows, kVectors, 1>(terms, A, B, C, accumulate);
    }
  };
};

} // namespace

template <typename T>
void multiply(const Product<T>& p) {
  vectorized<Multiply<T>>({p}, 0, p.N);
}

template void multiply(const Product<float>&);
template void multiply(const Product<double>&);

} // namespace lltm
