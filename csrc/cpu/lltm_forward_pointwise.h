#pragma once

#include "cpu/lltm_forward.h"

#include <ATen/OpMathType.h>

#include <cstdint>

// What follows the products of the forward step: the gates, and the new states.
namespace lltm {

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
    const ForwardPointers<scalar_t>& pointers,
    const ForwardProducts<at::opmath_type<scalar_t>>& products);

} // namespace lltm
