#pragma once

#include "cpu/lltm_forward.h"

#include <ATen/OpMathType.h>

#include <cstdint>

// What follows the products of the forward step: the gates, and the new states.
namespace lltm {

// Products [rows, 3, ld] of hidden units, without bias.
template <typename opmath_t>
struct ForwardProducts {
  const opmath_t* data;
  int64_t ld;
  int64_t first_row; // of the batch
  int64_t rows;
  int64_t first_unit;
  int64_t end_unit;
};

template <typename scalar_t>
void forward_pointwise(
    const ForwardPointers<scalar_t>& pointers,
    const ForwardProducts<at::opmath_type<scalar_t>>& products);

} // namespace lltm
