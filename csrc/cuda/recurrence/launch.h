#pragma once

#include "cuda/recurrence/arguments.h"

#include <cuda_runtime_api.h>

namespace lltm::recurrence {

// Runs Forward or Backward of a half type on the current device. Returns false,
// and has done nothing, where the GPU does not run all blocks at once: because
// it is too small or too old, or because others hold a part of it. Tests
// ask for more tiles in a block than the batch needs.
template <typename Args>
bool launch(const Args& args, cudaStream_t stream, int least_tiles = 1);

} // namespace lltm::recurrence
