#pragma once

#include "cpu/cell_sizes.h"

namespace lltm {

// On raw pointers to contiguous memory. Gradients that are null are not wanted.
template <typename scalar_t>
struct BackwardPointers : CellSizes {
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* old_h;
  scalar_t* d_input;
  scalar_t* d_weights;
  scalar_t* d_bias;
  scalar_t* d_old_h;
  scalar_t* d_old_cell;
};

template <typename scalar_t>
void backward_step(const BackwardPointers<scalar_t>& pointers);

} // namespace lltm
