#pragma once

#include "cpu/cell_sizes.h"
#include "cpu/lltm_gates.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/primitives/team.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/OpMathType.h>

#include <cstdint>
#include <vector>

namespace lltm {

// On raw pointers to contiguous memory; batch is that of h0.
template <typename scalar_t>
struct SequenceForwardPointers : CellSizes {
  const std::vector<SequenceStep>& steps;
  bool packed;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* bias;
  OldStates<scalar_t> old_h;
  OldCells<scalar_t> old_cell;
  scalar_t* output;
  scalar_t* cells;
  scalar_t* gates; // null: not wanted

  // The states of a step's rows, of which units [first_unit, end_unit) are
  // computed.
  States<scalar_t> states(
      int64_t i,
      const Part& rows,
      int64_t first_unit,
      int64_t end_unit,
      const at::opmath_type<scalar_t>* bias) const {
    const auto size = this->state_size;
    const auto at = (steps[i].first_row + rows.begin) * size;
    return {
        size,
        bias,
        old_cell.before(i, rows, first_unit, end_unit),
        old_cell.after(i, rows),
        output + at,
        cells + at,
        gates == nullptr ? nullptr : gates + 3 * at};
  }
};

} // namespace lltm
