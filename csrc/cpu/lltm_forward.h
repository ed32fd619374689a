#pragma once

#include "cpu/cell_sizes.h"
#include "cpu/lltm_gates.h"

namespace lltm {

// On raw pointers to contiguous memory.
template <typename scalar_t>
struct ForwardStep {
  CellSizes sizes;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* old_h;
  CellPointers<scalar_t> pointers;
};

// One step forward, with weights as they lie.
template <typename scalar_t>
void forward_step(const ForwardStep<scalar_t>& step);

} // namespace lltm
