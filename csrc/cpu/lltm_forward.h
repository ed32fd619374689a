#pragma once

#include "cpu/cell_sizes.h"

#include <ATen/OpMathType.h>

namespace lltm {

// On raw pointers to contiguous memory.
template <typename scalar_t>
struct ForwardPointers : CellSizes {
  using opmath_t = at::opmath_type<scalar_t>;

  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* bias;
  const scalar_t* old_h;
  const scalar_t* old_cell;
  scalar_t* new_h;
  scalar_t* new_cell;
  scalar_t* gates; // null: not wanted
  // For half types in a sequence: the cell states without rounding. The old one
  // is read in place of old_cell. Both are null otherwise.
  const opmath_t* unrounded_old_cell;
  opmath_t* unrounded_new_cell;
};

// One step forward, on the path that is fastest for its sizes.
template <typename scalar_t>
void forward_step(const ForwardPointers<scalar_t>& pointers);

} // namespace lltm
