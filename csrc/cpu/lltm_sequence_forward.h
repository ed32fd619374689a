#pragma once

#include "cpu/cell_sizes.h"
#include "ops/lltm_sequence_steps.h"

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
  const scalar_t* h0;
  const scalar_t* c0;
  const uint8_t* resets; // null: none
  scalar_t* output;
  scalar_t* cells;
  scalar_t* gates; // null: not wanted
};

// A whole sequence forward, on the path that is fastest for its sizes.
template <typename scalar_t>
void sequence_forward_steps(const SequenceForwardPointers<scalar_t>& pointers);

} // namespace lltm
