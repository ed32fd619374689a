#pragma once

#include "cpu/dot.h"
#include "cpu/lltm_forward_pointwise.h"
#include "cpu/pack.h"
#include "cpu/scratch.h"
#include "cpu/vectorize.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

// The forward step for a few rows of the batch.
namespace lltm {

// Whether the batch is so small that packing it costs more than it gains. Rows
// of weights that lie about a multiple of 4 KiB apart fall on the same sets of
// the L1 cache, which only products wider than 16 make up for.
constexpr int64_t kMaxDotBatch = 16;

template <typename scalar_t>
bool is_dot_faster(const ForwardArguments<scalar_t>& a) {
  constexpr int64_t kCacheLine = 64;
  const int64_t row_bytes = a.features() * sizeof(scalar_t);
  const bool rows_collide = (row_bytes + kCacheLine) % 4096 <= 2 * kCacheLine &&
      row_bytes > kCacheLine;
  return a.batch <= (rows_collide ? kMaxDotBatch : kMaxDotBatch / 2);
}

// The weights stream past; nothing of them is copied unless it is converted.
template <typename scalar_t>
class ForwardDot {
 public:
  explicit ForwardDot(const ForwardArguments<scalar_t>& arguments)
      : a_(arguments), x_(a_.batch * features_) {}

  void run() {
    convert(a_.old_h, a_.state_size, 0);
    convert(a_.input, a_.input_features, a_.state_size);
    const auto bytes = 3 * kUnits * features_ * int64_t(sizeof(scalar_t));
    const auto nanoseconds =
        bytes / kBytesPerNanosecond + a_.batch * bytes / 2 / kFlopPerNanosecond;
    at::parallel_for(
        0,
        (a_.state_size + kUnits - 1) / kUnits,
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          const Scratch<opmath_t> converted(kConverts ? kRows * features_ : 0);
          for (int64_t block = begin; block < end; ++block) {
            one_block(block * kUnits, converted.data());
          }
        });
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, opmath_t>;
  // Rows of weights that all of a larger batch takes in turn, while they lie in
  // the cache; and hidden units per block.
  static constexpr int64_t kRows = 24;
  static constexpr int64_t kUnits = 2 * kRows;

  // Into columns of x from offset.
  void convert(const scalar_t* from, int64_t size, int64_t offset) {
    vectorized<ConvertRows<scalar_t, opmath_t>>()(
        {from, size, size, x_.data() + offset, features_}, 0, a_.batch);
  }

  void one_block(int64_t first_unit, opmath_t* converted) const {
    opmath_t activations[kMaxDotBatch * 3 * kUnits];
    const auto units = std::min(kUnits, a_.state_size - first_unit);
    const auto rows_in_turn = kConverts || a_.batch > 4 ? kRows : kUnits;
    for (int64_t gate = 0; gate < 3; ++gate) {
      for (int64_t unit = 0; unit < units; unit += rows_in_turn) {
        const auto rows = std::min(rows_in_turn, units - unit);
        const auto row = gate * a_.state_size + first_unit + unit;
        dot(a_.batch,
            x_.data(),
            rows_of_weights(row, rows, converted),
            rows,
            features_,
            activations + gate * kUnits + unit,
            3 * kUnits);
      }
    }
    vectorized<ForwardRows<scalar_t>>()(
        {{a_, 0, first_unit, units}, activations, kUnits}, 0, a_.batch);
  }

  const opmath_t*
  rows_of_weights(int64_t row, int64_t rows, opmath_t* converted) const {
    const auto* weights = a_.weights + row * features_;
    if constexpr (kConverts) {
      vectorized<ConvertRows<scalar_t, opmath_t>>()(
          {weights, features_, features_, converted, features_}, 0, rows);
      return converted;
    } else {
      return weights;
    }
  }

  const ForwardArguments<scalar_t>& a_;
  const int64_t features_ = a_.features();
  const Scratch<opmath_t> x_; // [old_h, input]
};

} // namespace lltm
