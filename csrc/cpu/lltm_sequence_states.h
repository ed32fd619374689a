#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace lltm {

// The states that the steps of a sequence begin with, out of all states and the
// initial ones: rows of state_size.
template <typename scalar_t>
struct OldStates {
  const std::vector<SequenceStep>& steps;
  int64_t state_size;
  const scalar_t* states;
  const scalar_t* initial;
  // Null if there are none. Bytes, for a view of uint8 as bool may hold any.
  const uint8_t* resets;

  // The states that rows [begin, end) of a step begin with: where they lie
  // together, or copied to scratch where they lie apart.
  const scalar_t*
  rows(int64_t step, int64_t begin, int64_t end, scalar_t* scratch) const {
    if (begin >= end) {
      return initial;
    }
    const auto carried = steps[step].carried;
    if (!any_reset(step, begin, end)) {
      if (end <= carried) {
        return carried_row(step, begin);
      }
      if (begin >= carried) {
        return initial + begin * state_size;
      }
    }
    for (int64_t row = begin; row < end; ++row) {
      auto* to = scratch + (row - begin) * state_size;
      if (any_reset(step, row, row + 1)) {
        std::fill_n(to, state_size, scalar_t(0));
      } else {
        const auto* from =
            row < carried ? carried_row(step, row) : initial + row * state_size;
        std::memcpy(to, from, state_size * sizeof(scalar_t));
      }
    }
    return scratch;
  }

  bool any_reset(int64_t step, int64_t begin, int64_t end) const {
    if (resets == nullptr) {
      return false;
    }
    const auto* row = resets + steps[step].first_row;
    return std::any_of(
        row + begin, row + end, [](uint8_t reset) { return reset != 0; });
  }

 private:
  const scalar_t* carried_row(int64_t step, int64_t row) const {
    return states + (steps[step - 1].first_row + row) * state_size;
  }
};

// The cell states of half types, without rounding: the cell forgets nothing, so
// rounding at each step would lose what is added to a state that has grown. All
// other types carry on from the results, and have none here.
template <typename scalar_t>
class UnroundedCells {
 public:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kAny = !std::is_same_v<scalar_t, opmath_t>;

  UnroundedCells(int64_t batch, int64_t state_size, const scalar_t* c0)
      : state_size_(state_size),
        size_(batch * state_size),
        memory_(kAny ? 2 * size_ : 0) {
    // Both: rows of packed sequences may begin at any step.
    for (int64_t i = 0; kAny && i < 2; ++i) {
      vectorized<ConvertRows<scalar_t, opmath_t>>()(
          {c0, size_, size_, memory_.data() + i * size_, size_}, 0, 1);
    }
  }

  // Steps take turns to read one half and write the other.
  opmath_t* before(int64_t step, int64_t row) const {
    return kAny ? memory_.data() + step % 2 * size_ + row * state_size_
                : nullptr;
  }

  opmath_t* after(int64_t step, int64_t row) const {
    return before(step + 1, row);
  }

  // Zeroes units [first, last) of the rows in [begin, end) that a step resets.
  void reset(
      const OldStates<scalar_t>& states,
      int64_t step,
      int64_t begin,
      int64_t end,
      int64_t first,
      int64_t last) const {
    for (int64_t row = begin; kAny && row < end; ++row) {
      if (states.any_reset(step, row, row + 1)) {
        std::fill(before(step, row) + first, before(step, row) + last, 0);
      }
    }
  }

 private:
  const int64_t state_size_;
  const int64_t size_;
  const Scratch<opmath_t> memory_;
};

} // namespace lltm
