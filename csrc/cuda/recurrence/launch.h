#pragma once

#include "cuda/recurrence/backward.h"
#include "cuda/recurrence/forward.h"

#include <optional>

// Chooses the grid of the recurrence, also on the host, where tests run it.
namespace lltm::recurrence {

// What a launch needs of a GPU.
template <typename T, typename Args>
concept Gpu = requires(T gpu, const Args& args, int tiles, int bytes) {
  // How many blocks it runs at once, or nothing after an error.
  std::optional<int64_t>(gpu.resident_blocks(args, tiles, bytes));
  // Whether it took them all.
  bool(gpu.launch(args, tiles, /*blocks=*/1, bytes));
  std::string(gpu.error); // its words for an error
};

// Runs Forward or Backward of a half type, with as few tiles in a block as fit:
// then more blocks work. Tests ask for more than the batch needs.
template <typename Args>
Launched launch_with_fewest_tiles(
    Gpu<Args> auto gpu,
    const Args& args,
    int least_tiles = 1) {
  for (int tiles = least_tiles; tiles <= 4; tiles *= 2) {
    const auto blocks =
        grid_blocks(args.sequence.batch, args.state_size, tiles);
    // A step may begin while the last is summed: so twice.
    const int shared_bytes = 2 * tiles * args.kSums * int{sizeof(float)};
    const std::optional<int64_t> resident =
        gpu.resident_blocks(args, tiles, shared_bytes);
    if (!resident) {
      return {Outcome::kNotAnswered, gpu.error};
    }
    if (blocks <= *resident) {
      const bool ran = gpu.launch(args, tiles, blocks, shared_bytes);
      return {ran ? Outcome::kRan : Outcome::kRefused, gpu.error};
    }
  }
  return {Outcome::kDoesNotFit, gpu.error};
}

} // namespace lltm::recurrence
