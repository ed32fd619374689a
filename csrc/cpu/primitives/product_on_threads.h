#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/work.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// The products of backward: C = A @ B on all threads. The rows of A are padded
// with the zeros that a product needs. B is any matrix, and packed where it has
// to be or that is worth it. Then come the functions that pack it.
namespace lltm {

// B is packed if A has more rows and more terms than these, so that what tiles
// read lies together.
constexpr int64_t kRowsWorthPacking = 64;
constexpr int64_t kTermsWorthPacking = 32;
// The rows and the columns of a block, at most, and its terms. What is read of
// A then takes up to 768 KiB in float, and stays in L2 while all columns pass.
constexpr int64_t kSideOfABlock = 384;
constexpr int64_t kTermsOfABlock = 512;
// Sums of so many terms are added up, and then added to one another. One chain
// over a batch of 131,072 rows has three times the error of PyTorch's product.
constexpr int64_t kTermsOfASum = 8192;

// C is divided in blocks, which one thread computes as a whole, panel by panel.
struct ProductPlan {
  bool packs; // B; else it is read as it lies
  int64_t columns_per_panel;
  int64_t columns_per_block;
  int64_t column_blocks;
  int64_t rows_per_block;
  int64_t row_blocks;
};

// C is [M, N] and has K terms. No size is 0.
template <typename scalar_t, typename gemm_t>
ProductPlan plan_of(int64_t M, int64_t N, int64_t K) {
  constexpr bool pairs = kPair<gemm_t> == 2;
  constexpr bool converts = !std::is_same_v<scalar_t, gemm_t>;
  const bool packs =
      pairs || converts || (M > kRowsWorthPacking && K > kTermsWorthPacking);
  const auto columns_per_tile = pairs ? 16 : panel_width<gemm_t>(N);
  const auto columns_per_block =
      round_up(size_of_a_block(N, kSideOfABlock), columns_per_tile);
  const auto column_blocks = at::divup(N, columns_per_block);
  // There are as many blocks as threads, unless that leaves few rows to each.
  const int64_t threads = at::get_num_threads();
  const auto rows_per_block = at::divup(
      M,
      std::max(
          at::divup(M, kSideOfABlock),
          std::min(at::divup(threads, column_blocks), M / kRowsWorthPacking)));
  return {
      .packs = packs,
      // A panel is as wide as a tile, so what a tile reads of B lies together,
      // in few pages. oneDNN multiplies all columns of a block in one call.
      .columns_per_panel =
          packs && !pairs ? columns_per_tile : columns_per_block,
      .columns_per_block = columns_per_block,
      .column_blocks = column_blocks,
      .rows_per_block = rows_per_block,
      .row_blocks = at::divup(M, rows_per_block)};
}

// Memory for A [rows, terms], with room for the zeros that a product needs.
template <typename T>
class LeftOperand {
  const int64_t ld_;
  Scratch<T> memory_;

 public:
  LeftOperand(int64_t rows, int64_t terms)
      : ld_(odd_number_of_lines(padded_terms<T>(terms))), memory_(rows * ld_) {}

  Matrix<T> matrix() {
    return {memory_.data(), ld_};
  }

  // Writes the zeros after the terms of each row.
  void pad(int64_t rows, int64_t terms) {
    const auto end = padded_terms<T>(terms);
    for (int64_t row = 0; terms < end && row < rows; ++row) {
      std::fill(matrix().row(row) + terms, matrix().row(row) + end, T(0));
    }
  }

 private:
  // Rows that lie a multiple of many cache lines apart fall on the same sets of
  // a cache. Pairs of rows lie twice as far apart.
  static int64_t odd_number_of_lines(int64_t elements) {
    constexpr int64_t line = 64 / sizeof(T);
    return (at::divup(elements, line) | 1) * line;
  }
};

// C [M, N] = A @ B, or C += A @ B. C is computed in opmath_t; if out_t is a
// half type, it is then overwritten, and accumulate must be false.
template <typename scalar_t, typename gemm_t, typename out_t>
struct ProductOnThreads {
  using opmath_t = at::opmath_type<out_t>;
  static constexpr bool kInPlace = std::is_same_v<out_t, opmath_t>;

  int64_t M;
  int64_t N;
  int64_t K;
  Matrix<const gemm_t> A;   // [M, padded_terms(K)]
  Matrix<const scalar_t> B; // [K, N]
  Matrix<out_t> C;
  bool accumulate = false;

  void run() const {
    if (M == 0 || N == 0) {
      return;
    }
    const auto plan = plan_of<scalar_t, gemm_t>(M, N, K);
    const auto block_size = plan.rows_per_block * plan.columns_per_block;
    at::parallel_for(
        0,
        plan.row_blocks * plan.column_blocks,
        grain_size(2 * terms() * block_size / kFlopPerNanosecond),
        [&](int64_t begin, int64_t end) {
          const ProductGuard<gemm_t> guard;
          Panels<gemm_t> packed(
              plan.packs ? std::min(terms(), kTermsOfABlock) : 0,
              plan.columns_per_block,
              plan.columns_per_panel);
          Scratch<opmath_t> sums(
              kInPlace && terms() <= kTermsOfASum ? 0 : block_size);
          for (auto i = begin; i < end; ++i) {
            const auto row = i / plan.column_blocks * plan.rows_per_block;
            const auto column = i % plan.column_blocks * plan.columns_per_block;
            one_block(
                {.row = row,
                 .column = column,
                 .rows = std::min(plan.rows_per_block, M - row),
                 .columns = std::min(plan.columns_per_block, N - column),
                 .packed = plan.packs ? &packed : nullptr,
                 .columns_per_panel = plan.columns_per_panel,
                 .sums = {sums.data(), plan.columns_per_block}});
          }
        });
  }

 private:
  struct Block {
    int64_t row; // of C
    int64_t column;
    int64_t rows;
    int64_t columns;
    // Those columns of B, for some terms at a time. Null: B is not packed.
    Panels<gemm_t>* packed;
    int64_t columns_per_panel;
    Matrix<opmath_t> sums; // [rows, columns], if C cannot take them
  };

  int64_t terms() const {
    return padded_terms<gemm_t>(K);
  }

  void one_block(const Block& block) const {
    const auto C_block = C.part(block.row, block.column);
    if constexpr (kInPlace) {
      multiply(block, 0, kTermsOfASum, C_block, accumulate);
      for (auto k = kTermsOfASum; k < terms(); k += kTermsOfASum) {
        multiply(block, k, k + kTermsOfASum, block.sums, false);
        for (int64_t i = 0; i < block.rows; ++i) {
          for (int64_t j = 0; j < block.columns; ++j) {
            C_block.row(i)[j] += block.sums.row(i)[j];
          }
        }
      }
    } else { // the rounding of C is larger than the error of any chain
      multiply(block, 0, terms(), block.sums, false);
      run_with_best_isa(
          ConvertRows<opmath_t, out_t>{block.sums, block.columns, C_block},
          0,
          block.rows);
    }
  }

  // to = or += the products of terms [begin, end).
  void multiply(
      const Block& block,
      int64_t begin,
      int64_t end,
      Matrix<opmath_t> to,
      bool adds) const {
    end = std::min(end, terms());
    for (auto k = begin; k < end; k += kTermsOfABlock) {
      const auto size = std::min(kTermsOfABlock, end - k);
      const auto B_block = B.part(k, block.column);
      if (block.packed != nullptr) {
        pack_rows(B_block, K - k, block.columns, 0, size, *block.packed);
      }
      for (int64_t j = 0; j < block.columns; j += block.columns_per_panel) {
        lltm::multiply<gemm_t>(
            {.M = block.rows,
             .N = std::min(block.columns_per_panel, block.columns - j),
             .K = size,
             .A = A.part(block.row, k),
             .B = panel_of(block, B_block, j),
             .C = to.part(0, j),
             .accumulate = adds || k > begin,
             .several_chains = M <= 2});
      }
    }
  }

  // The columns from j on.
  static Matrix<const gemm_t>
  panel_of(const Block& block, Matrix<const scalar_t> B_block, int64_t j) {
    if constexpr (std::is_same_v<scalar_t, gemm_t>) {
      if (block.packed == nullptr) {
        return B_block.part(0, j);
      }
    }
    return block.packed->panel(j / block.columns_per_panel);
  }
};

// Terms of a panel that are packed at a time: an even number, for pairs.
constexpr int64_t kTermsPackedAtOnce = 16;

// Packs a matrix with a row for each term, as many columns as the panels have,
// and zeros beyond its rows.
template <typename from_t, typename T>
void pack_rows_on_threads(
    Matrix<const from_t> from,
    int64_t rows,
    Panels<T>& panels) {
  at::parallel_for(
      0,
      at::divup(panels.terms(), kTermsPackedAtOnce),
      grain_size(kTermsPackedAtOnce * panels.columns() / kPackedPerNanosecond),
      [&](int64_t begin, int64_t end) {
        pack_rows(
            from,
            rows,
            panels.columns(),
            begin * kTermsPackedAtOnce,
            std::min(end * kTermsPackedAtOnce, panels.terms()),
            panels);
      });
}

template <typename T>
struct PairRows;

// The same for terms [begin, end), on the calling thread. Some rows go to all
// panels before the next ones, because processors fetch memory in advance where
// it is read along rows.
template <typename from_t, typename T>
void pack_rows(
    Matrix<const from_t> from,
    int64_t rows,
    int64_t columns,
    int64_t begin,
    int64_t end,
    Panels<T>& panels) {
  for (auto term = begin; term < end; term += kTermsPackedAtOnce) {
    const auto last = std::min(term + kTermsPackedAtOnce, end);
    for (int64_t i = 0; i * panels.width() < columns; ++i) {
      const auto of_panel = from.part(0, i * panels.width());
      const auto size = std::min(panels.width(), columns - i * panels.width());
      if constexpr (kPair<T> == 2) {
        run_with_best_isa(
            PairRows<T>{of_panel, rows, size, panels.panel(i)},
            term / 2,
            last / 2);
      } else {
        run_with_best_isa(
            ConvertRows<from_t, T>{of_panel, size, panels.panel(i)},
            term,
            std::min(last, rows));
      }
    }
  }
}

// to [rows / 2, columns, 2] = from [rows, columns], with zeros beyond the rows.
// begin and end count pairs. Copied by the bits, because loops that copy the
// struct do not vectorise.
template <typename T>
struct PairRows {
  Matrix<const T> from;
  int64_t rows;
  int64_t columns;
  Matrix<T> to;

  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    for (int64_t pair = begin; pair < end; ++pair) {
      const auto row = 2 * pair;
      if (row + 1 < rows) {
        one_pair<true>(from.row(row), from.row(row + 1), to.row(row));
      } else if (row < rows) {
        one_pair<false>(from.row(row), nullptr, to.row(row));
      } else {
        std::fill_n(to.row(row), 2 * columns, T(0));
      }
    }
  }

 private:
  template <bool kHasSecond>
  C10_ALWAYS_INLINE void one_pair(
      const T* __restrict__ first,
      const T* __restrict__ second,
      T* __restrict__ to_row) const {
    for (int64_t i = 0; i < columns; ++i) {
      to_row[2 * i].x = first[i].x;
      to_row[2 * i + 1].x = kHasSecond ? second[i].x : 0;
    }
  }
};

} // namespace lltm
