#pragma once

#include "cuda/recurrence/backward.h"
#include "cuda/recurrence/forward.h"
#include "emulator.h"

#include <string>
#include <type_traits>

// How check.cpp runs kernels on the host.
namespace backend {

constexpr char kPlants[] =
    "no_barrier, plain_stores, no_sentinel, misaligned_output, short_shared, "
    "too_few_resident";

struct Plants : emulator::Plants {
  bool no_sentinel = false;
  bool misaligned_output = false;
  bool short_shared = false;
  bool too_few_resident = false;

  bool set(const std::string& name) {
    const std::pair<const char*, bool*> all[] = {
        {"no_barrier", &no_barrier},
        {"plain_stores", &plain_stores},
        {"no_sentinel", &no_sentinel},
        {"misaligned_output", &misaligned_output},
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

template <int tiles, typename Args, typename Kernel>
void run(
    const Args& args,
    int shared_floats,
    uint32_t seed,
    const Plants& plants,
    const Kernel& kernel) {
  const auto blocks = static_cast<int>(lltm::recurrence::grid_blocks(
      args.sequence.batch, args.state_size, tiles));
  emulator::run(
      {blocks,
       lltm::recurrence::kThreads,
       shared_floats - (plants.short_shared ? 4 : 0),
       blocks - (plants.too_few_resident ? 1 : 0),
       seed,
       plants},
      kernel);
}

// body(std::integral_constant<int, tiles>()), for 1, 2 or 4.
template <typename Body>
void with_tiles(int tiles, const Body& body) {
  if (tiles == 1) {
    body(std::integral_constant<int, 1>());
  } else if (tiles == 2) {
    body(std::integral_constant<int, 2>());
  } else {
    body(std::integral_constant<int, 4>());
  }
}

template <typename scalar_t>
void run_recurrence(
    const lltm::recurrence::Forward<scalar_t>& args,
    int tiles,
    uint32_t seed,
    const Plants& plants) {
  with_tiles(tiles, [&](auto count) {
    run<count>(
        args,
        2 * lltm::recurrence::kForwardSums<count>,
        seed,
        plants,
        [&](const emulator::Machine& machine, float* shared) {
          lltm::recurrence::run_forward<count>(machine, args, shared);
        });
  });
}

template <typename scalar_t>
void run_recurrence(
    const lltm::recurrence::Backward<scalar_t>& args,
    int tiles,
    uint32_t seed,
    const Plants& plants) {
  with_tiles(tiles, [&](auto count) {
    run<count>(
        args,
        2 * lltm::recurrence::kBackwardSums<count>,
        seed,
        plants,
        [&](const emulator::Machine& machine, float* shared) {
          lltm::recurrence::run_backward<count>(machine, args, shared);
        });
  });
}

} // namespace backend
