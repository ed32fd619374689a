#pragma once

#include "cpu/choices.h"
#include "cpu/lltm_forward_pointwise.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/gemm_of_24_columns.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

// The forward step for many rows of the batch.
namespace lltm {

// Transposes products [3, units, ld], which have a column for each row of the
// batch. to is [kVector, 3, padded units], for kVector rows of the batch.
template <typename opmath_t>
struct TransposeProducts {
  const opmath_t* from;
  int64_t units;
  int64_t ld;
  opmath_t* to;

  // Gates.
  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    const auto padded = round_up(units, kVector);
    for (int64_t gate = begin; gate < end; ++gate) {
      for (int64_t unit = 0; unit < units; unit += kVector) {
        transpose_block(
            from + (gate * units + unit) * ld,
            ld,
            kVector,
            kVector,
            to + gate * padded + unit,
            3 * padded);
      }
    }
  }
};

// gates.T = weights @ [old_h, input].T, in blocks of hidden units and panels of
// the batch. Weights are read as they lie, and the panels are packed. The gates
// of a block are computed while its products lie in the cache.
template <typename scalar_t, typename gemm_t>
class ForwardGemm {
 public:
  explicit ForwardGemm(const ForwardPointers<scalar_t>& pointers)
      : a_(pointers),
        folded_rows_(kFolds ? rows_of_folded_panel(a_.batch) : 0),
        panels_(panels()),
        units_(units_per_block()),
        panels_per_task_(panels_per_task()),
        packed_(end_row(panels_ - 1) * round_up(features_, 2)) {}

  void run() {
    pack();
    const auto unit_blocks = at::divup(a_.state_size, units_);
    const auto panel_blocks = at::divup(panels_, panels_per_task_);
    const auto nanoseconds =
        nanoseconds_of(units_, panels_per_task_ * width(0));
    at::parallel_for(
        0,
        unit_blocks * panel_blocks,
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          // Transposition reads whole tiles.
          const Scratch<opmath_t> products(
              3 * units_ * kPanelWidth * panels_per_task_ +
              kVector * 2 * kPanelWidth);
          const Scratch<gemm_t> converted(
              kConverts ? 3 * units_ * kMaxK<gemm_t> : 0);
          for (int64_t task = begin; task < end; ++task) {
            one_block(
                task / panel_blocks * units_,
                task % panel_blocks * panels_per_task_,
                products.data(),
                converted.data());
          }
          release_gemm<gemm_t>();
        });
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;
  static constexpr auto kPairs = kPair<gemm_t>;

  // GemmOf24Columns multiplies float32.
  static constexpr bool kFolds = std::is_same_v<gemm_t, float>;

  // The last panel is folded, if any is.
  int64_t panels() const {
    return at::divup(a_.batch - folded_rows_, kPanelWidth) +
        (folded_rows_ > 0 ? 1 : 0);
  }

  bool is_folded(int64_t panel) const {
    return folded_rows_ > 0 && panel == panels_ - 1;
  }

  int64_t first_row(int64_t panel) const {
    return is_folded(panel) ? a_.batch - folded_rows_ : panel * kPanelWidth;
  }

  int64_t rows(int64_t panel) const {
    return is_folded(panel)
        ? folded_rows_
        : std::min(kPanelWidth, a_.batch - folded_rows_ - first_row(panel));
  }

  int64_t width(int64_t panel) const {
    return is_folded(panel)
        ? kFoldedColumns
        : round_up(rows(panel), columns_of_a_vector<gemm_t>());
  }

  int64_t end_row(int64_t panel) const {
    return first_row(panel) + width(panel);
  }

  gemm_t* packed(int64_t panel, int64_t feature) const {
    return packed_.data() + first_row(panel) * features_ +
        feature * width(panel);
  }

  int64_t nanoseconds_of(int64_t units, int64_t rows) const {
    return 6 * units * rows * features_ / kFlopPerNanosecond;
  }

  // A block has many units, because each call of gemm() has a cost.
  int64_t units_per_block() const {
    const auto most = std::min(kMaxUnits, kProductsOfAGate / width(0));
    const auto nanoseconds = nanoseconds_of(a_.state_size, width(0));
    return size_of_a_block(
        a_.state_size, most, least_units(panels_, nanoseconds));
  }

  // Few blocks of units leave some panels for every thread.
  int64_t panels_per_task() const {
    const auto blocks = at::divup(a_.state_size, units_);
    const auto tasks = at::divup(at::get_num_threads(), blocks);
    return std::min(kMaxPanelsPerTask, at::divup(panels_, tasks));
  }

  // [old_h, input].T in panels [features, width].
  void pack() {
    const auto chunks = at::divup(features_, kPackedFeatures);
    const auto nanoseconds =
        std::min(features_, kPackedFeatures) * width(0) / kPackedPerNanosecond;
    at::parallel_for(
        0,
        panels_ * chunks,
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          for (int64_t task = begin; task < end; ++task) {
            const auto panel = task / chunks;
            const auto first = task % chunks * kPackedFeatures;
            const auto last = std::min(first + kPackedFeatures, features_);
            pack(panel, first, last, a_.old_h, 0, a_.state_size);
            pack(
                panel, first, last, a_.input, a_.state_size, a_.input_features);
            if constexpr (kFolds) {
              if (is_folded(panel)) {
                fold(panel, first, last);
              }
            }
          }
        });
  }

  // Packs the features in [first, last) of from, whose own begin at offset.
  void pack(
      int64_t panel,
      int64_t first,
      int64_t last,
      const scalar_t* from,
      int64_t offset,
      int64_t size) {
    using from_t = std::conditional_t<kPairs == 2, Pair<scalar_t>, scalar_t>;
    using to_t = std::conditional_t<kPairs == 2, Pair<gemm_t>, gemm_t>;
    const auto begin = std::max(first - offset, int64_t(0));
    const auto end = std::min(last - offset, size);
    if (begin < end) {
      const auto* rows_of_panel = from + first_row(panel) * size;
      vectorized<PackTransposed<from_t, to_t>>()(
          {reinterpret_cast<const from_t*>(rows_of_panel),
           size / kPairs,
           rows(panel),
           width(panel),
           reinterpret_cast<to_t*>(packed(panel, offset)),
           width(panel)},
          begin / kPairs,
          end / kPairs);
    }
  }

  // Packed features in [first, last), of which first is even.
  void fold(int64_t panel, int64_t first, int64_t last) {
    if (last % 2 == 1) {
      std::fill_n(packed(panel, last), kFoldedColumns, gemm_t(0));
    }
    vectorized<FoldRows>()({packed(panel, 0)}, first / 2, at::divup(last, 2));
  }

  // The products of a panel, among those of a task.
  opmath_t* products_of(
      int64_t panel,
      int64_t first_panel,
      int64_t units,
      opmath_t* products) const {
    return products + 3 * units * (first_row(panel) - first_row(first_panel));
  }

  void one_block(
      int64_t first_unit,
      int64_t first_panel,
      opmath_t* products,
      gemm_t* converted) const {
    const auto units = std::min(units_, a_.state_size - first_unit);
    const auto end_panel = std::min(panels_, first_panel + panels_per_task_);
    // The rows of the gates follow one another where a block has all units.
    const auto gates = units == a_.state_size ? 3 : 1;
    for (int64_t k = 0; k < features_; k += kMaxK<gemm_t>) {
      const auto size_k = std::min(kMaxK<gemm_t>, features_ - k);
      for (int64_t gate = 0; gate < 3; gate += gates) {
        const auto* weights =
            a_.weights + (gate * a_.state_size + first_unit) * features_ + k;
        const gemm_t* A;
        if constexpr (kConverts) {
          vectorized<ConvertRows<scalar_t, gemm_t>>()(
              {weights, features_, size_k, converted, size_k},
              0,
              gates * units);
          A = converted;
        } else {
          A = weights;
        }
        for (int64_t panel = first_panel; panel < end_panel; ++panel) {
          multiply(
              panel,
              gates * units,
              size_k,
              A,
              kConverts ? size_k : features_,
              packed(panel, k),
              products_of(panel, first_panel, units, products) +
                  gate * units * width(panel),
              k > 0);
        }
      }
    }
    for (int64_t panel = first_panel; panel < end_panel; ++panel) {
      write_panel(
          panel,
          first_unit,
          units,
          products_of(panel, first_panel, units, products));
    }
  }

  void write_panel(
      int64_t panel,
      int64_t first_unit,
      int64_t units,
      const opmath_t* products) const {
    alignas(64) opmath_t rows_of_products[kVector * 3 * kMaxUnits];
    for (int64_t row = 0; row < rows(panel); row += kVector) {
      vectorized<TransposeProducts<opmath_t>>()(
          {products + row, units, width(panel), rows_of_products}, 0, 3);
      forward_pointwise<scalar_t>(
          a_,
          {rows_of_products,
           round_up(units, kVector),
           first_row(panel) + row,
           std::min(kVector, rows(panel) - row),
           first_unit,
           first_unit + units});
    }
  }

  // C [rows, width] = A [rows, size_k] @ B [size_k, width], for the width of a
  // panel.
  void multiply(
      int64_t panel,
      int64_t rows,
      int64_t size_k,
      const gemm_t* A,
      int64_t lda,
      const gemm_t* B,
      opmath_t* C,
      bool accumulate) const {
    if constexpr (kFolds) {
      if (is_folded(panel)) {
        return vectorized<GemmOf24Columns>()(
            {size_k, A, lda, B, C, accumulate}, 0, rows);
      }
    }
    const auto width = this->width(panel);
    const auto at_once =
        std::min(rows, rows_of_weights_in_a_call(lda * sizeof(gemm_t), width));
    for (int64_t row = 0; row < rows; row += at_once) {
      gemm<gemm_t>(
          std::min(at_once, rows - row),
          width,
          size_k,
          A + row * lda,
          lda,
          B,
          width,
          C + row * width,
          width,
          accumulate);
    }
  }

  const ForwardPointers<scalar_t>& a_;
  const int64_t features_ = a_.features();
  const int64_t folded_rows_; // of the last panel; 0: it is like the others
  const int64_t panels_;
  const int64_t units_;
  const int64_t panels_per_task_;
  const Scratch<gemm_t> packed_;
};

} // namespace lltm
