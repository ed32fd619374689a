#pragma once

#include "cpu/cell_sizes.h"
#include "ops/lltm_sequence_steps.h"

#include <cstdint>
#include <vector>

namespace lltm {

// On raw pointers to contiguous memory; batch is that of h0. Gradients that are
// null are not wanted.
template <typename scalar_t>
struct SequenceBackwardPointers : CellSizes {
  const std::vector<SequenceStep>& steps;
  bool packed;
  const scalar_t* grad_output;
  const scalar_t* grad_cells;
  const scalar_t* output;
  const scalar_t* cells;
  const scalar_t* gates;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* h0;
  const uint8_t* resets; // null: none
  scalar_t* d_input;
  scalar_t* d_weights;
  scalar_t* d_bias;
  scalar_t* d_h0;
  scalar_t* d_c0;
};

template <typename scalar_t>
void sequence_backward_steps(
    const SequenceBackwardPointers<scalar_t>& pointers);

} // namespace lltm
