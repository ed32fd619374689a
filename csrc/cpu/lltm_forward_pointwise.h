#pragma once

#include "cpu/cell_sizes.h"

#include <ATen/OpMathType.h>

#include <cstdint>

// What follows the products of the forward step: the gates, and the new states.
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
  // Half types in a sequence: the cell states without rounding, of which the
  // old one is read in place of old_cell. Else null.
  const opmath_t* unrounded_old_cell;
  opmath_t* unrounded_new_cell;
};

// Products [rows, 3, ld] of hidden units, without bias: ld units at a time, in
// blocks that lie stride apart.
template <typename opmath_t>
struct ForwardProducts {
  const opmath_t* data;
  int64_t ld;
  int64_t first_row; // of the batch
  int64_t rows;
  int64_t first_unit;
  int64_t end_unit;
  int64_t stride = 0;
  // What is computed next lies so many units away in each row, and is fetched
  // meanwhile. 0: it is not.
  int64_t to_next_units = 0;
};

template <typename scalar_t>
void forward_pointwise(
    const ForwardPointers<scalar_t>& arguments,
    const ForwardProducts<at::opmath_type<scalar_t>>& products);

} // namespace lltm
