#pragma once

#include "cuda/recurrence/backward.h"
#include "cuda/recurrence/forward.h"

#include <optional>

// Chooses the grid of the recurrence. Compiles for the host too, where tests
// run it.
namespace lltm::recurrence {

// What a block takes. A step may begin while the last is summed: so twice.
template <int tiles, typename scalar_t>
constexpr int shared_floats(const Forward<scalar_t>&) {
  return 2 * kForwardSums<tiles>;
}

template <int tiles, typename scalar_t>
constexpr int shared_floats(const Backward<scalar_t>&) {
  return 2 * kBackwardSums<tiles>;
}

// Nothing if it does not fit with so many tiles in a block.
template <int tiles, typename Gpu, typename Args>
std::optional<Outcome>
launch_with_tiles(Gpu& gpu, const Args& args, int least_tiles) {
  if (tiles < least_tiles) {
    return std::nullopt;
  }
  const auto blocks = grid_blocks(args.sequence.batch, args.state_size, tiles);
  const auto shared_bytes =
      shared_floats<tiles>(args) * static_cast<int>(sizeof(float));
  const std::optional<int64_t> resident =
      gpu.template resident_blocks<tiles>(args, shared_bytes);
  if (!resident) {
    return Outcome::kNotAnswered;
  }
  if (blocks > *resident) {
    return std::nullopt;
  }
  const bool launched = gpu.template launch<tiles>(
      args, static_cast<unsigned>(blocks), shared_bytes);
  return launched ? Outcome::kRan : Outcome::kRefused;
}

// Runs Forward or Backward of a half type. The Gpu has
//
//   resident_blocks<tiles>(args, shared_bytes)  how many it runs at once, or
//                                               nothing after an error;
//   launch<tiles>(args, blocks, shared_bytes)   whether it took them all;
//   error                                       its words for an error.
//
// Tests ask for more tiles in a block than the batch needs.
template <typename Gpu, typename Args>
Launched launch(Gpu gpu, const Args& args, int least_tiles = 1) {
  // With fewer tiles in a block, more blocks work.
  auto outcome = launch_with_tiles<1>(gpu, args, least_tiles);
  if (!outcome) {
    outcome = launch_with_tiles<2>(gpu, args, least_tiles);
  }
  if (!outcome) {
    outcome = launch_with_tiles<4>(gpu, args, least_tiles);
  }
  return {outcome.value_or(Outcome::kDoesNotFit), gpu.error};
}

} // namespace lltm::recurrence
