#pragma once

#include "cuda/recurrence/launch.h"
#include "emulator.h"

#include <climits>
#include <cstdint>
#include <string>

// How check.cpp runs kernels on the host.
namespace backend {

constexpr bool kFarRows = true;

struct Plants : emulator::Plants {
  bool short_shared = false;
  bool too_few_resident = false;

  bool set(const std::string& name) {
    const std::pair<const char*, bool*> all[] = {
        {"no_barrier", &no_barrier},
        {"plain_stores", &plain_stores},
        {"short_shared", &short_shared},
        {"too_few_resident", &too_few_resident}};
    for (const auto& [known, value] : all) {
      if (name == known) {
        *value = true;
        return true;
      }
    }
    return false;
  }
};

inline void* allocate(size_t bytes) {
  return operator new(bytes, std::align_val_t(16));
}

inline void release(void* data) {
  operator delete(data, std::align_val_t(16));
}

template <int tiles, typename scalar_t>
void run_block(
    const emulator::Machine& machine,
    const lltm::recurrence::Forward<scalar_t>& args,
    float* shared) {
  lltm::recurrence::ForwardBlock<tiles, scalar_t, emulator::Machine>(
      machine, args)
      .run(shared);
}

template <int tiles, typename scalar_t>
void run_block(
    const emulator::Machine& machine,
    const lltm::recurrence::Backward<scalar_t>& args,
    float* shared) {
  lltm::recurrence::BackwardBlock<tiles, scalar_t, emulator::Machine>(
      machine, args)
      .run(shared);
}

struct EmulatedGpu {
  uint32_t seed;
  Plants plants = {};
  int64_t processors = INT64_MAX;
  int most_shared_bytes = INT_MAX;
  std::string error = {};

  template <typename Args>
  int64_t resident_blocks(const Args&, int, int shared_bytes) const {
    return shared_bytes <= most_shared_bytes ? processors : 0;
  }

  template <typename Args>
  void launch(const Args& args, int tiles, int64_t blocks, int shared_bytes)
      const {
    const auto count = static_cast<int>(blocks);
    emulator::run(
        {.blocks = count,
         .threads = lltm::recurrence::kThreads,
         .shared_floats = shared_bytes / static_cast<int>(sizeof(float)) -
             (plants.short_shared ? 4 : 0),
         .resident = count - (plants.too_few_resident ? 1 : 0),
         .seed = seed,
         .plants = plants},
        [&](const emulator::Machine& machine, float* shared) {
          tiles == 1       ? run_block<1>(machine, args, shared)
              : tiles == 2 ? run_block<2>(machine, args, shared)
                           : run_block<4>(machine, args, shared);
        });
  }
};

template <typename Args>
void run_recurrence(
    const Args& args,
    int tiles,
    uint32_t seed,
    const Plants& plants) {
  lltm::recurrence::launch_with_fewest_tiles(
      EmulatedGpu{seed, plants}, args, tiles);
}

} // namespace backend
