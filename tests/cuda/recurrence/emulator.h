#pragma once

#include "cuda/recurrence/arguments.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <type_traits>

// The execution model of a GPU, on one thread of the host. Each thread of the
// grid is a fiber. Which of them goes on is random, and so is when a relaxed
// store is seen. What it cannot show stands in docs/reliability.md.
namespace emulator {

using lltm::recurrence::Words;

// What cannot happen in a kernel that is right.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Faults of the machine, by which tests show that a kernel depends on it.
struct Plants {
  bool no_barrier = false;
  bool plain_stores = false;
};

class Grid;

// What GpuMachine is on a GPU.
class Machine {
 public:
  // In right runs a thread looks up to 5,000 times, because the next to run is
  // chosen at random.
  static constexpr int kMostLooks = 1 << 16;

  Machine(Grid* grid, int block, int thread)
      : grid_(grid), block_(block), thread_(thread) {}

  int thread() const {
    return thread_;
  }

  int block() const {
    return block_;
  }

  [[noreturn]] void fail(const char* why) const {
    throw Fault(why);
  }

  void sync_block() const;
  void sync_warp() const;
  void pause() const;
  uint32_t shuffle_xor(uint32_t value, int mask) const;

  // In the header, so that the sanitizers see the access.
  Words load_relaxed(const Words* from) const {
    require(reinterpret_cast<uintptr_t>(from) % 16 == 0, "a misaligned load");
    Words words;
    for (int i = 0; i < 4; ++i) {
      words.word[i] = __atomic_load_n(&from->word[i], __ATOMIC_RELAXED);
    }
    return words;
  }

  void prefetch(const void*) const {}

  // Other blocks run at any time.
  uint32_t clock() const {
    return 0;
  }

  void wait_since(uint32_t, uint32_t) const {}

  void store_relaxed(uint32_t* to, uint32_t value) const {
    require(reinterpret_cast<uintptr_t>(to) % 4 == 0, "a misaligned store");
    require(
        (value & 0xffff) != 0xffff && value >> 16 != 0xffff,
        "the sentinel was published");
    if (plants().plain_stores) {
      *to = value;
      return;
    }
    require(
        __atomic_load_n(to, __ATOMIC_RELAXED) == lltm::recurrence::kSentinel,
        "a word was published twice");
    store_later(to, value);
  }

  template <typename scalar_t>
  void mma(
      float (&sums)[4],
      const uint32_t (&weights)[4],
      uint32_t word0,
      uint32_t word1) const {
    const uint32_t operands[6] = {
        weights[0], weights[1], weights[2], weights[3], word0, word1};
    multiply(sums, operands, [](uint16_t bits) {
      scalar_t value;
      value.x = bits;
      return static_cast<float>(value);
    });
  }

 private:
  static void require(bool holds, const char* what) {
    if (!holds) {
      throw Fault(what);
    }
  }

  const Plants& plants() const;
  void store_later(uint32_t* to, uint32_t value) const;
  void multiply(
      float (&sums)[4],
      const uint32_t (&operands)[6],
      float (*as_float)(uint16_t)) const;

  Grid* grid_;
  int block_;
  int thread_;
};

struct Launch {
  int blocks;
  int threads;
  int shared_floats;
  int resident;  // at most so many blocks at once, as on a GPU
  uint32_t seed; // of the schedule
  Plants plants = {};
};

// Runs kernel(machine, shared) in every thread. Throws Fault, also where
// nothing goes on.
void run(
    const Launch& launch,
    const std::function<void(const Machine&, float*)>& kernel);

} // namespace emulator
