#pragma once

#include "cuda/recurrence/backward.h"
#include "cuda/recurrence/forward.h"

#include <string>

// Chooses the grid of the recurrence, also on the host, where tests run it.
namespace lltm::recurrence {

// What a launch needs of a GPU.
template <typename T, typename Args>
concept Gpu = requires(T gpu, const Args& args, int tiles, int bytes) {
  // How many blocks it runs at once.
  int64_t(gpu.resident_blocks(args, tiles, bytes));
  gpu.launch(args, tiles, /*blocks=*/1, bytes);
  std::string(gpu.error); // what failed of these, or nothing
};

// Runs Forward or Backward of a half type, with as few tiles in a block as fit:
// then more blocks work. Tests ask for more than the batch needs. Returns why
// it did not run, and then nothing was done, or an empty string.
template <typename Args>
std::string launch_with_fewest_tiles(
    Gpu<Args> auto gpu,
    const Args& args,
    int least_tiles = 1) {
  for (int tiles = least_tiles; tiles <= 4; tiles *= 2) {
    const auto blocks =
        grid_blocks(args.sequence.batch, args.state_size, tiles);
    // A step may begin while the last is summed: so twice.
    const int shared_bytes = 2 * tiles * args.kSums * int{sizeof(float)};
    const bool fits = blocks <= gpu.resident_blocks(args, tiles, shared_bytes);
    if (fits) {
      gpu.launch(args, tiles, blocks, shared_bytes);
    }
    if (fits || !gpu.error.empty()) {
      return gpu.error;
    }
  }
  return "the GPU is too small for its batch, or too old";
}

} // namespace lltm::recurrence
