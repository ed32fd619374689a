#pragma once

#include "ops/sequence_steps.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
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

} // namespace lltm
