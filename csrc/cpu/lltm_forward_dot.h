#pragma once

#include "cpu/choices.h"
#include "cpu/lltm_forward_pointwise.h"
#include "cpu/primitives/dot.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>

// The forward step for a few rows of the batch.
namespace lltm {

// The weights stream past; nothing of them is copied unless it is converted.
template <typename scalar_t>
class ForwardDot {
 public:
  explicit ForwardDot(const ForwardPointers<scalar_t>& pointers)
      : a_(pointers),
        units_(size_of_a_block(a_.state_size, kDotUnits)),
        x_(a_.batch * features_) {}

  void run() {
    convert(a_.old_h, a_.state_size, 0);
    convert(a_.input, a_.input_features, a_.state_size);
    const auto bytes = 3 * units_ * features_ * int64_t(sizeof(scalar_t));
    const auto nanoseconds =
        bytes / kBytesPerNanosecond + a_.batch * bytes / 2 / kFlopPerNanosecond;
    at::parallel_for(
        0,
        at::divup(a_.state_size, units_),
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          const Scratch<opmath_t> converted(
              kConverts ? kDotRows * features_ : 0);
          for (int64_t block = begin; block < end; ++block) {
            one_block(block * units_, converted.data());
          }
        });
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, opmath_t>;

  // Into columns of x from offset.
  void convert(const scalar_t* from, int64_t size, int64_t offset) {
    vectorized<ConvertRows<scalar_t, opmath_t>>()(
        {from, size, size, x_.data() + offset, features_}, 0, a_.batch);
  }

  void one_block(int64_t first_unit, opmath_t* converted) const {
    opmath_t products[kMaxDotBatch * 3 * kDotUnits];
    const auto units = std::min(units_, a_.state_size - first_unit);
    const auto rows_in_turn = kConverts || a_.batch > 4 ? kDotRows : kDotUnits;
    for (int64_t gate = 0; gate < 3; ++gate) {
      for (int64_t unit = 0; unit < units; unit += rows_in_turn) {
        const auto rows = std::min(rows_in_turn, units - unit);
        const auto row = gate * a_.state_size + first_unit + unit;
        dot(a_.batch,
            rows,
            features_,
            x_.data(),
            features_,
            rows_of_weights(row, rows, converted),
            features_,
            products + gate * kDotUnits + unit,
            3 * kDotUnits,
            false);
      }
    }
    forward_pointwise<scalar_t>(
        a_, {products, kDotUnits, 0, a_.batch, first_unit, first_unit + units});
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

  const ForwardPointers<scalar_t>& a_;
  const int64_t features_ = a_.features();
  const int64_t units_;
  const Scratch<opmath_t> x_; // [old_h, input]
};

} // namespace lltm
