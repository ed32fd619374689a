#include "cpu/primitives/product.h"

#include "cpu/primitives/tile.h"
#include "cpu/primitives/vectorize.h"

#include <algorithm>
#include <cstring>

namespace lltm {

namespace {

// Terms of B that are copied at a time, at most: they lie on the stack.
constexpr int64_t kCopiedTerms = 256;
// With so many rows of A a tile asks for its share of what is copied next of B,
// whose rows may lie too far apart for the processor to fetch it. Fewer rows
// take as long to ask as to wait.
constexpr int64_t kRowsWorthFetching = 64;
// Up to so many terms C is computed panel by panel, which passes A over and
// over, and else it is A that stays in L2.
constexpr int64_t kTermsOfWholePanels = 512;

// Vectors of a tile of long rows. With AVX2, 6 leave no register for B.
template <int64_t kBytes>
constexpr int64_t kVectorsOfLongRows = kHasManyRegisters<kBytes> ? 6 : 3;

template <typename T>
struct Product {
  int64_t M;
  int64_t K;
  const T* A;
  int64_t lda;
  const T* B;
  int64_t ldb;
  T* C;
  int64_t ldc;
  bool accumulate;
  int64_t all_rows;
  int64_t chain;

  // Columns of B and C.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr auto lanes = Lanes<T, kBytes>::count;
    if (K <= kFewTerms && all_rows > kFewRows) {
      const bool overlaps = !accumulate && end - begin >= lanes;
      const auto last = overlaps ? end : end - (end - begin) % lanes;
      in_tiles<kTileRows<kBytes, kVectorsOfLongRows<kBytes>>>(
          0, M, LongRows<kBytes>{*this, begin, last});
      begin = last;
    }
    const bool by_panels = M > kFewRows && K <= kTermsOfWholePanels;
    const auto terms = by_panels ? K : chain;
    for (int64_t k = 0; k < K && begin < end; k += terms) {
      panels<kBytes>({0, M, k, std::min(k + terms, K)}, begin, end);
    }
  }

 private:
  struct Block {
    int64_t first_row;
    int64_t end_row;
    int64_t first_term;
    int64_t end_term;
  };

  // The columns of a tile's rows, in whole vectors. The last one may overlap
  // the one before.
  template <int64_t kBytes>
  struct LongRows {
    const Product& p;
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
          p.A + row * p.lda,
          p.lda,
          p.B + column,
          p.ldb,
          p.C + row * p.ldc + column,
          p.ldc,
          p.accumulate);
    }
  };

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void panels(const Block& block, int64_t begin, int64_t end)
      const {
    constexpr auto lanes = Lanes<T, kBytes>::count;
    auto column = begin;
    auto vectors = (end - begin) / lanes;
    for (; vectors >= 3 && vectors != 4; vectors -= 3) {
      panel<kBytes, 3>(block, column, 3 * lanes);
      column += 3 * lanes;
    }
    // 4 are two panels of 2, for a panel of 1 is the slowest.
    for (; vectors >= 2; vectors -= 2) {
      panel<kBytes, 2>(block, column, 2 * lanes);
      column += 2 * lanes;
    }
    for (; column < end; column += lanes) {
      panel<kBytes, 1>(block, column, std::min(lanes, end - column));
    }
  }

  template <int64_t kBytes, int64_t kVectors>
  C10_ALWAYS_INLINE void
  panel(const Block& block, int64_t column, int64_t columns) const {
    constexpr auto width = kVectors * Lanes<T, kBytes>::count;
    alignas(64) T copy[kCopiedTerms * width];
    const auto rows = block.end_row - block.first_row;
    // Not by the rows of this call: what is copied is added in shorter chains.
    const bool copies = columns < width || (all_rows > kFewRows && ldb > width);
    const bool fetches = copies && rows >= kRowsWorthFetching;
    const auto most = copies ? std::min(chain, kCopiedTerms) : chain;
    for (auto k = block.first_term; k < block.end_term; k += most) {
      const auto terms = std::min(most, block.end_term - k);
      const auto* from = B + k * ldb + column;
      if (copies) {
        copy_columns(from, terms, columns, copy, width);
      }
      const auto* next = k + terms < block.end_term
          ? from + terms * ldb
          : B + block.first_term * ldb + column + width;
      in_tiles<kTileRows<kBytes, kVectors>>(
          block.first_row,
          block.end_row,
          Tiles<kBytes, kVectors>{
              *this,
              k,
              terms,
              copies ? copy : from,
              copies ? width : ldb,
              column,
              columns,
              fetches ? next : nullptr});
    }
  }

  C10_ALWAYS_INLINE void copy_columns(
      const T* from,
      int64_t terms,
      int64_t columns,
      T* to,
      int64_t width) const {
    for (int64_t term = 0; term < terms; ++term) {
      auto* row = to + term * width;
      if (columns == width) {
        std::memcpy(row, from + term * ldb, width * sizeof(T));
      } else {
        std::memcpy(row, from + term * ldb, columns * sizeof(T));
        std::fill(row + columns, row + width, T(0));
      }
    }
  }

  template <int64_t kBytes, int64_t kVectors>
  struct Tiles {
    const Product& p;
    int64_t k;
    int64_t terms;
    const T* B;
    int64_t ldb;
    int64_t column;
    int64_t columns;
    const T* next; // what is copied next; null: nothing

    C10_ALWAYS_INLINE void fetch(int64_t row, int64_t rows) const {
      if (next == nullptr) {
        return;
      }
      constexpr auto width = kVectors * Lanes<T, kBytes>::count;
      const auto end = (row + rows) * terms / p.M;
      for (auto term = row * terms / p.M; term < end; ++term) {
        for (int64_t i = 0; i < width; i += 64 / sizeof(T)) {
          __builtin_prefetch(next + term * p.ldb + i, 0, 2);
        }
      }
    }

    template <int64_t kRows>
    C10_ALWAYS_INLINE void rows(int64_t row) const {
      fetch(row, kRows);
      constexpr auto width = kVectors * Lanes<T, kBytes>::count;
      const auto* A = p.A + row * p.lda + k;
      auto* C = p.C + row * p.ldc + column;
      const bool accumulate = p.accumulate || k > 0;
      if (columns == width) {
        return one<kRows>(A, C, p.ldc, accumulate);
      }
      if constexpr (kVectors == 1) {
        alignas(64) T sums[kRows * width];
        one<kRows>(A, sums, width, false);
        for (int64_t i = 0; i < kRows; ++i) {
          for (int64_t j = 0; j < columns; ++j) {
            auto& c = C[i * p.ldc + j];
            c = accumulate ? c + sums[i * width + j] : sums[i * width + j];
          }
        }
      }
    }

    // An addition takes four cycles, and two begin in each: few rows need more
    // chains than sums.
    template <int64_t kRows>
    C10_ALWAYS_INLINE void one(const T* A, T* C, int64_t ldc, bool accumulate)
        const {
      if constexpr (kRows <= 2) {
        if (p.all_rows <= 2) {
          return tile<T, kBytes, kRows, kVectors, 4 / kRows>(
              terms, A, p.lda, B, ldb, C, ldc, accumulate);
        }
      }
      tile<T, kBytes, kRows, kVectors, 1>(
          terms, A, p.lda, B, ldb, C, ldc, accumulate);
    }
  };
};

} // namespace

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
    int64_t chain) {
  if (K == 0 && !accumulate) {
    for (int64_t row = 0; row < M; ++row) {
      std::fill_n(C + row * ldc, N, T(0));
    }
  }
  vectorized<Product<T>>()(
      {M, K, A, lda, B, ldb, C, ldc, accumulate, all_rows, chain}, 0, N);
}

template decltype(multiply<float>) multiply<float>;
template decltype(multiply<double>) multiply<double>;

} // namespace lltm
