#pragma once

#include "cuda/recurrence/arguments.h"

#include <cuda_runtime_api.h>

#include <string>

namespace lltm::recurrence {

// launch_with_fewest_tiles() of launch.h, on the current device.
template <typename Args>
std::string
cuda_launch(const Args& args, cudaStream_t stream, int least_tiles = 1);

} // namespace lltm::recurrence
