#pragma once

#include "cpu/choices.h"
#include "cpu/lltm_backward_pointwise.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/outer_product.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/row_times_matrix.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

// The products of the backward step, and of those of a sequence.
namespace lltm {

// A block of C in scalar_t, which is computed in opmath_t. If the two types are
// the same, it is computed in place.
template <typename scalar_t>
class Products {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  Products(int64_t rows, int64_t columns)
      : columns_(columns), scratch_(kInPlace ? 0 : rows * columns) {}

  opmath_t* of(scalar_t* C) {
    if constexpr (kInPlace) {
      return C;
    } else {
      return scratch_.data();
    }
  }

  int64_t ld(int64_t ldc) const {
    return kInPlace ? ldc : columns_;
  }

  void finish(int64_t rows, int64_t columns, scalar_t* C, int64_t ldc) {
    if constexpr (!kInPlace) {
      vectorized<ConvertRows<opmath_t, scalar_t>>()(
          {scratch_.data(), columns_, columns, C, ldc}, 0, rows);
    }
  }

 private:
  static constexpr bool kInPlace = std::is_same_v<scalar_t, opmath_t>;
  int64_t columns_;
  Scratch<opmath_t> scratch_;
};

// d_weights = d_gates.T @ [old_h, input], in blocks of about the same size.
// [old_h, input] is packed into panels of its columns. out_t is scalar_t, or
// opmath_t where results are summed up further.
template <typename scalar_t, typename gemm_t, typename out_t>
class BackwardWeights {
 public:
  // Adds to d_weights if accumulate.
  BackwardWeights(
      const CellSizes& sizes,
      const GateGradients<gemm_t>& d_gates,
      const scalar_t* old_h,
      const scalar_t* input,
      out_t* d_weights,
      bool accumulate)
      : sizes_(sizes),
        d_gates_(d_gates),
        old_h_(old_h),
        input_(input),
        d_weights_(d_weights),
        accumulate_(accumulate),
        width_(round_up(
            equal_parts(features_, weights_panel(batch_, sizeof(gemm_t))),
            kVector)),
        block_rows_(equal_parts(rows_, kWeightsBlock / width_)),
        panels_(at::divup(features_, width_)),
        packed_(panels_ * width_ * batch_) {}

  void run() {
    pack();
    const auto row_blocks = at::divup(rows_, block_rows_);
    const auto nanoseconds = block_rows_ * width_ *
        std::max<int64_t>(2 * batch_, 20) / kFlopPerNanosecond;
    at::parallel_for(
        0,
        row_blocks * panels_,
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          Products<out_t> products(block_rows_, width_);
          for (int64_t task = begin; task < end; ++task) {
            one_block(
                task / panels_ * block_rows_,
                task % panels_ * width_,
                products);
          }
          release_gemm<gemm_t>();
        });
  }

 private:
  static constexpr auto kPairs = kPair<gemm_t>;

  // The size of each part, if there are as few as possible.
  static int64_t equal_parts(int64_t size, int64_t most) {
    return at::divup(size, std::max<int64_t>(1, at::divup(size, most)));
  }

  void pack() {
    at::parallel_for(
        0,
        panels_,
        grain_size(batch_ * width_ / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t panel = begin; panel < end; ++panel) {
            pack(panel, old_h_, 0, sizes_.state_size);
            pack(panel, input_, sizes_.state_size, sizes_.input_features);
          }
        });
  }

  // Packs the columns of from that the panel has. from holds the columns
  // [first, first + size) of [old_h, input].
  void pack(int64_t panel, const scalar_t* from, int64_t first, int64_t size) {
    const auto begin = std::max(panel * width_, first);
    const auto end = std::min((panel + 1) * width_, first + size);
    if (begin < end) {
      auto* to = packed_.data() + panel * width_ * batch_;
      vectorized<PackRows<scalar_t, gemm_t>>()(
          {from + begin - first,
           size,
           sizes_.batch,
           end - begin,
           to + (begin - panel * width_) * kPairs,
           width_},
          0,
          batch_ / kPairs);
    }
  }

  void one_block(int64_t row, int64_t column, Products<out_t>& products) const {
    const auto size_m = std::min(block_rows_, rows_ - row);
    const auto size_n = std::min(width_, features_ - column);
    auto* C = d_weights_ + row * features_ + column;
    multiply(
        row, size_m, column, size_n, products.of(C), products.ld(features_));
    products.finish(size_m, size_n, C, features_);
  }

  void multiply(
      int64_t row,
      int64_t size_m,
      int64_t column,
      int64_t size_n,
      at::opmath_type<out_t>* C,
      int64_t ldc) const {
    if constexpr (kPairs == 1) {
      if (batch_ == 1 && !accumulate_) {
        return vectorized<OuterProduct<gemm_t>>()(
            {d_gates_.block(0) + row, packed_.data() + column, size_n, C, ldc},
            0,
            size_m);
      }
    }
    for (int64_t k = 0; k < batch_; k += kMaxK<gemm_t>) {
      gemm<gemm_t>(
          size_m,
          size_n,
          std::min(kMaxK<gemm_t>, batch_ - k),
          d_gates_.block(k) + row * d_gates_.ld(k),
          d_gates_.ld(k),
          packed_.data() + column * batch_ + k * width_,
          width_,
          C,
          ldc,
          accumulate_ || k > 0);
    }
  }

  const CellSizes sizes_;
  const GateGradients<gemm_t>& d_gates_;
  const scalar_t* const old_h_;
  const scalar_t* const input_;
  out_t* const d_weights_;
  const bool accumulate_;
  const int64_t features_ = sizes_.features();
  const int64_t rows_ = d_gates_.units;
  const int64_t batch_ = d_gates_.batch;
  const int64_t width_;
  const int64_t block_rows_;
  const int64_t panels_;
  const Scratch<gemm_t> packed_;
};

// d_X = d_gates @ columns of weights, [batch, columns], in blocks.
template <typename scalar_t, typename gemm_t>
class BackwardColumns {
 public:
  BackwardColumns(
      const CellSizes& sizes,
      const GateGradients<gemm_t>& d_gates,
      const scalar_t* weights,
      int64_t first_column,
      int64_t columns,
      scalar_t* d_X)
      : d_gates_(d_gates),
        weights_(weights + first_column),
        batch_(sizes.batch),
        features_(sizes.features()),
        columns_(columns),
        d_X_(d_X),
        blocks_(column_blocks<scalar_t, gemm_t>(batch_, features_, columns)),
        task_rows_(std::min(batch_, kRowsOfATask)) {}

  void run() const {
    if constexpr (!kConverts) {
      if (batch_ == 1) {
        return run_one_row();
      }
    }
    const auto row_tasks = at::divup(batch_, task_rows_);
    at::parallel_for(
        0,
        at::divup(columns_, width_) * row_tasks,
        grain_size(2 * task_rows_ * width_ * size_k_ / kFlopPerNanosecond),
        [&](int64_t begin, int64_t end) {
          Products<scalar_t> products(task_rows_, width_);
          const Scratch<gemm_t> packed(
              blocks_.packed ? terms() * ld_packed_ : 0);
          for (int64_t task = begin; task < end; ++task) {
            one_block(
                task % row_tasks * task_rows_,
                task / row_tasks * width_,
                products,
                packed.data());
          }
          release_gemm<gemm_t>();
        });
  }

 private:
  static constexpr bool kConverts =
      !std::is_same_v<scalar_t, gemm_t> || kPair<gemm_t> == 2;

  // Threads share whole vectors, so the last columns alone are rounded as
  // scalars, whatever the number of threads.
  void run_one_row() const {
    const auto bytes_of_a_vector =
        kVector * size_k_ * static_cast<int64_t>(sizeof(gemm_t));
    at::parallel_for(
        0,
        at::divup(columns_, kVector),
        grain_size(bytes_of_a_vector / kBytesPerNanosecond),
        [&](int64_t begin, int64_t end) {
          vectorized<RowTimesMatrix<gemm_t>>()(
              {size_k_, d_gates_.rows, weights_, features_, d_X_},
              begin * kVector,
              std::min(end * kVector, columns_));
        });
  }

  int64_t terms() const {
    return std::min(size_k_, blocks_.terms);
  }

  void one_block(
      int64_t first_row,
      int64_t column,
      Products<scalar_t>& products,
      gemm_t* packed) const {
    const auto size_m = std::min(task_rows_, batch_ - first_row);
    const auto size_n = std::min(width_, columns_ - column);
    auto* C = d_X_ + first_row * columns_ + column;
    const auto ldc = products.ld(columns_);
    for (int64_t k = 0; k < size_k_; k += blocks_.terms) {
      const auto size_k = std::min(blocks_.terms, size_k_ - k);
      const auto* B = block_weights(k, size_k, column, size_n, packed);
      for (int64_t row = 0, rows = 0; row < size_m; row += rows) {
        // Each call reads the weights anew, and those that lie far apart
        // slowly.
        rows = blocks_.packed ? rows_of_block(size_m - row) : size_m;
        gemm<gemm_t>(
            rows,
            size_n,
            size_k,
            d_gates_.rows + (first_row + row) * size_k_ + k,
            size_k_,
            B,
            blocks_.packed ? ld_packed_ : features_,
            products.of(C) + row * ldc,
            ldc,
            k > 0);
      }
    }
    products.finish(size_m, size_n, C, columns_);
  }

  const gemm_t* block_weights(
      int64_t k,
      int64_t size_k,
      int64_t column,
      int64_t size_n,
      gemm_t* packed) const {
    const auto* from = weights_ + k * features_ + column;
    if constexpr (!kConverts) {
      if (!blocks_.packed) {
        return from;
      }
    }
    vectorized<PackRows<scalar_t, gemm_t>>()(
        {from, features_, d_gates_.units - k, size_n, packed, ld_packed_},
        0,
        size_k / kPair<gemm_t>);
    return packed;
  }

  const GateGradients<gemm_t>& d_gates_;
  const scalar_t* const weights_; // from the first of the columns
  const int64_t batch_;
  const int64_t features_;
  const int64_t columns_;
  scalar_t* const d_X_;
  const int64_t size_k_ = d_gates_.ld_rows;
  const ColumnBlocks blocks_;
  const int64_t width_ = blocks_.columns;
  const int64_t ld_packed_ = round_up(width_, kVector);
  const int64_t task_rows_;
};

} // namespace lltm
