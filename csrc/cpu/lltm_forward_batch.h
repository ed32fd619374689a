#pragma once

#include "cpu/lltm_forward.h"
#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"
#include "cpu/primitives/work.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace lltm {

// Up to so many rows of the batch are multiplied without packing them, in dot
// products. Rows beyond whole registers are, too, if they would fill half a
// register at most. Pairs are always packed.
constexpr int64_t kRowsOfDotProducts = 8;
// Rows of the batch that are packed side by side for oneDNN. At 256x1024x1024,
// half as many take 20 % longer on Zen 4.
constexpr int64_t kPanelWidth = 64;
// Features of a panel that are packed as one task.
constexpr int64_t kPackedFeatures = 512;

// [old_h, input] in the layout that the products of a step take: transposed
// panels of the batch, and the rest of the rows as they lie.
template <typename scalar_t, typename gemm_t>
class PackedBatch {
 public:
  explicit PackedBatch(const ForwardStep<scalar_t>& step)
      : a_(step),
        packed_(panels_ == 0 ? 0 : end_row() * features_),
        rest_(rest_rows_ * features_) {}

  // [old_h, input].T in panels [features, width], and the other rows.
  void pack() const {
    if (rest_rows_ > 0) {
      copy_rest(a_.old_h, 0, a_.sizes.state_size);
      copy_rest(a_.input, a_.sizes.state_size, a_.sizes.input_features);
    }
    const auto parts = at::divup(features_, kPackedFeatures);
    const auto nanoseconds =
        std::min(features_, kPackedFeatures) * width(0) / kPackedPerNanosecond;
    at::parallel_for(
        0,
        panels_ * parts,
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          for (int64_t task = begin; task < end; ++task) {
            const auto panel = task / parts;
            const auto first = task % parts * kPackedFeatures;
            const auto last = std::min(first + kPackedFeatures, features_);
            const auto size = a_.sizes.state_size;
            pack(panel, first, last, a_.old_h, 0, size);
            pack(panel, first, last, a_.input, size, a_.sizes.input_features);
          }
        });
  }

  int64_t first_row(int64_t panel) const {
    return panel * panel_width_;
  }

  int64_t rows(int64_t panel) const {
    const auto rows_left = packed_rows_ - first_row(panel);
    return panel == panels_ - 1 ? rows_left : panel_width_;
  }

  int64_t width(int64_t panel) const {
    return panels_ == 0 ? 0 : round_up(rows(panel), columns_of_a_register());
  }

  // [features, width], from a feature on.
  Matrix<const gemm_t> panel(int64_t panel, int64_t feature) const {
    return packed(panel).part(feature, 0);
  }

  // The rows that no panel holds: [rest_rows, features], from packed_rows on.
  Matrix<const gemm_t> rest() const {
    return {rest_.data(), features_};
  }

  int64_t rest_rows() const {
    return rest_rows_;
  }

  int64_t packed_rows() const {
    return packed_rows_;
  }

  int64_t panels() const {
    return panels_;
  }

  // The rows of every panel but the last. Where the tile multiplies, the last
  // panel may be a register wider.
  int64_t panel_width() const {
    return panel_width_;
  }

  // By which panels are multiplied.
  Method method() const {
    return method_;
  }

 private:
  static constexpr auto kPairs = kPair<gemm_t>;

  static int64_t columns_of_a_register() {
    return kPairs == 2 ? kVector : vector_bytes() / int64_t(sizeof(gemm_t));
  }

  int64_t choose_rest_rows() const {
    if (kPairs == 2) {
      return 0; // dot() multiplies no pairs
    }
    if (a_.sizes.batch <= kRowsOfDotProducts) {
      return a_.sizes.batch;
    }
    const auto rest = a_.sizes.batch % columns_of_a_register();
    return rest <= columns_of_a_register() / 2 ? rest : 0;
  }

  int64_t choose_panel_width() const {
    return method_ != Method::kTile ? kPanelWidth : 2 * columns_of_a_register();
  }

  // The tile takes panels of two registers, and its last panel takes three
  // where one would be left. So half of the registers, rounded down, are
  // panels.
  int64_t choose_panels() const {
    return method_ != Method::kTile || packed_rows_ < panel_width_
        ? at::divup(packed_rows_, panel_width_)
        : at::divup(packed_rows_, columns_of_a_register()) / 2;
  }

  int64_t end_row() const {
    return first_row(panels_ - 1) + width(panels_ - 1);
  }

  Matrix<gemm_t> packed(int64_t panel) const {
    return {packed_.data() + first_row(panel) * features_, width(panel)};
  }

  void copy_rest(const scalar_t* from, int64_t offset, int64_t size) const {
    vectorized<ConvertRows<scalar_t, gemm_t>>(
        {{from + packed_rows_ * size, size},
         size,
         {rest_.data() + offset, features_}},
        0,
        rest_rows_);
  }

  // Packs the features in [first, last) of from, whose own begin at offset.
  void pack(
      int64_t panel,
      int64_t first,
      int64_t last,
      const scalar_t* from,
      int64_t offset,
      int64_t size) const {
    using from_t = std::conditional_t<kPairs == 2, Pair<scalar_t>, scalar_t>;
    using to_t = std::conditional_t<kPairs == 2, Pair<gemm_t>, gemm_t>;
    const auto begin = std::max(first - offset, int64_t(0));
    const auto end = std::min(last - offset, size);
    if (begin < end) {
      const auto* rows_of_panel = from + first_row(panel) * size;
      // A row of pairs, [features / 2, width, 2], takes the place of two rows
      // of elements. As offset is even, both begin here.
      auto* to = packed(panel).row(offset);
      vectorized<Transpose<from_t, to_t>>(
          {.from =
               {reinterpret_cast<const from_t*>(rows_of_panel), size / kPairs},
           .columns = rows(panel),
           .padded = width(panel),
           .to = {reinterpret_cast<to_t*>(to), width(panel)}},
          begin / kPairs,
          end / kPairs);
    }
  }

  const ForwardStep<scalar_t>& a_;
  const int64_t features_ = a_.sizes.features();
  const Method method_ =
      is_onednn_faster<gemm_t>() ? Method::kOneDNNInOneCall : Method::kTile;
  const int64_t rest_rows_ = choose_rest_rows();
  const int64_t packed_rows_ = a_.sizes.batch - rest_rows_;
  const int64_t panel_width_ = choose_panel_width();
  const int64_t panels_ = choose_panels();
  const Scratch<gemm_t> packed_;
  const Scratch<gemm_t> rest_;
};

} // namespace lltm
