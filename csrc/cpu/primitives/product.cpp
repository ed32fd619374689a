#include "cpu/primitives/product.h"

#include "cpu/primitives/tile.h"
#include "cpu/primitives/vectorize.h"

#include <algorithm>
#include <cstring>

namespace lltm {

namespace {

// Terms of one chain of additions. So few keep the error below twice that of
// PyTorch's products, and three vectors of B for all of them within L1, of 24
// KB: with 256 terms of 64 bytes, 20x128x512x512 takes 5 % more on the Xeon.
template <int64_t kBytes>
constexpr int64_t kTerms = kBytes == 64 ? 128 : 256;
// With more rows of A, B is copied, so that what each tile reads lies together
// in L1.
constexpr int64_t kRowsWorthCopying = 24;

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
  bool has_few_rows;

  // Columns of B and C.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr auto lanes = Lanes<T, kBytes>::count;
    for (int64_t k = 0; k < K; k += kTerms<kBytes>) {
      auto column = begin;
      for (; column + 3 * lanes <= end; column += 3 * lanes) {
        panel<kBytes, 3>(k, column, 3 * lanes);
      }
      if (column + 2 * lanes <= end) {
        panel<kBytes, 2>(k, column, 2 * lanes);
        column += 2 * lanes;
      }
      for (; column < end; column += lanes) {
        panel<kBytes, 1>(k, column, std::min(lanes, end - column));
      }
    }
  }

 private:
  template <int64_t kBytes, int64_t kVectors>
  C10_ALWAYS_INLINE void panel(int64_t k, int64_t column, int64_t columns)
      const {
    constexpr auto width = kVectors * Lanes<T, kBytes>::count;
    const auto terms = std::min(kTerms<kBytes>, K - k);
    const auto* from = B + k * ldb + column;
    alignas(64) T copy[kTerms<kBytes> * width];
    const bool is_copied =
        columns < width || (M > kRowsWorthCopying && ldb > width);
    if (is_copied) {
      for (int64_t term = 0; term < terms; ++term) {
        auto* to = copy + term * width;
        if (columns == width) {
          std::memcpy(to, from + term * ldb, width * sizeof(T));
        } else {
          std::memcpy(to, from + term * ldb, columns * sizeof(T));
          std::fill(to + columns, to + width, T(0));
        }
      }
    }
    in_tiles<kTileRows<kBytes, kVectors>>(
        0,
        M,
        Tiles<kBytes, kVectors>{
            *this,
            k,
            terms,
            is_copied ? copy : from,
            is_copied ? width : ldb,
            column,
            columns});
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

    template <int64_t kRows>
    C10_ALWAYS_INLINE void rows(int64_t row) const {
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
        if (p.has_few_rows) {
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
    bool has_few_rows) {
  if (K == 0 && !accumulate) {
    for (int64_t row = 0; row < M; ++row) {
      std::fill_n(C + row * ldc, N, T(0));
    }
  }
  vectorized<Product<T>>()(
      {M, K, A, lda, B, ldb, C, ldc, accumulate, has_few_rows}, 0, N);
}

template decltype(multiply<float>) multiply<float>;
template decltype(multiply<double>) multiply<double>;

} // namespace lltm
