#pragma once

#include "cpu/primitives/pack.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/team.h"
#include "cpu/primitives/vectorize.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace lltm {

// The rows that begin a new sequence.
struct Resets {
  // Null if there are none. Read as bytes, because a view of uint8 as bool may
  // hold any byte.
  const uint8_t* data;

  bool any(const SequenceStep& step, int64_t begin, int64_t end) const {
    if (data == nullptr) {
      return false;
    }
    const auto* rows = data + step.first_row;
    return std::any_of(
        rows + begin, rows + end, [](uint8_t reset) { return reset != 0; });
  }
};

// resets is contiguous, or undefined.
inline Resets bytes_of(const at::Tensor& resets) {
  return {
      resets.defined() ? static_cast<const uint8_t*>(resets.const_data_ptr())
                       : nullptr};
}

// The h that each step of a sequence begins with: rows of state_size.
template <typename scalar_t>
struct OldH {
  const std::vector<SequenceStep>& steps;
  int64_t state_size;
  const scalar_t* h; // of all steps
  const scalar_t* h0;
  Resets resets;

  // The h that rows [begin, end) of a step begin with. It is copied to scratch,
  // unless it lies together and has type to_t.
  template <typename to_t>
  const to_t* rows(int64_t i, int64_t begin, int64_t end, to_t* scratch) const {
    const auto& step = steps[i];
    if constexpr (std::is_same_v<to_t, scalar_t>) {
      const bool together = end <= step.carried || begin >= step.carried;
      if (together && !resets.any(step, begin, end)) {
        return row_of(i, begin);
      }
    }
    for (auto row = begin; row < end; ++row) {
      auto* to = scratch + (row - begin) * state_size;
      if (resets.any(step, row, row + 1)) {
        std::fill_n(to, state_size, to_t(0));
      } else {
        vectorized<ConvertRows<scalar_t, to_t>>(
            {{row_of(i, row), state_size}, state_size, {to, state_size}}, 0, 1);
      }
    }
    return scratch;
  }

 private:
  const scalar_t* row_of(int64_t i, int64_t row) const {
    return row < steps[i].carried
        ? h + (steps[i - 1].first_row + row) * state_size
        : h0 + row * state_size;
  }
};

// The cell states before and after a step, in two buffers that take turns. They
// are not rounded: the cell forgets nothing, so rounding at each step would
// lose what is added to a state that has grown.
template <typename scalar_t>
class CellStates {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  CellStates(
      const std::vector<SequenceStep>& steps,
      int64_t batch,
      int64_t state_size,
      const scalar_t* c0,
      Resets resets)
      : steps_(steps),
        state_size_(state_size),
        size_(batch * state_size),
        resets_(resets),
        memory_(2 * size_) {
    // Both buffers, because in reverse packed sequences may begin at any step.
    for (int64_t i = 0; i < 2; ++i) {
      vectorized<ConvertRows<scalar_t, opmath_t>>(
          {{c0, size_}, size_, {half(i), size_}}, 0, 1);
    }
  }

  // The cell states from the first of the rows on. Units [first, end) of rows
  // that the step resets become zero.
  const opmath_t*
  before(int64_t i, const Part& rows, int64_t first, int64_t end) const {
    auto* cells = half(i) + rows.begin * state_size_;
    for (int64_t row = 0; row < rows.size(); ++row) {
      const auto of_batch = rows.begin + row;
      if (resets_.any(steps_[i], of_batch, of_batch + 1)) {
        auto* cell = cells + row * state_size_;
        std::fill(cell + first, cell + end, opmath_t(0));
      }
    }
    return cells;
  }

  // The place where the step leaves them for the next one.
  opmath_t* after(int64_t i, const Part& rows) const {
    return half(i + 1) + rows.begin * state_size_;
  }

 private:
  opmath_t* half(int64_t i) const {
    return memory_.data() + i % 2 * size_;
  }

  const std::vector<SequenceStep>& steps_;
  const int64_t state_size_;
  const int64_t size_;
  const Resets resets_;
  const Scratch<opmath_t> memory_;
};

} // namespace lltm
