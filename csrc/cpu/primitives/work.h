#pragma once

#include <ATen/Parallel.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <thread>

// How much work there is, how many threads it is worth, and how they divide it.
namespace lltm {

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Measured on Zen 5.
constexpr int64_t kFlopPerNanosecond = 200;
constexpr int64_t kPackedPerNanosecond = 4; // elements copied to another layout
constexpr int64_t kNanosecondsOfGates = 1;  // of a hidden unit

// To wake a thread costs 1 to 3 us, a barrier some 200 ns.
constexpr int64_t kNanosecondsWorthAThread = 5000;
constexpr int64_t kNanosecondsWorthABarrier = 500;

// The grain size for at::parallel_for: so many tasks are worth waking a thread.
inline int64_t grain_size(int64_t nanoseconds_per_task) {
  return std::max<int64_t>(
      1, kNanosecondsWorthAThread / std::max<int64_t>(1, nanoseconds_per_task));
}

// The size of blocks of rows, hidden units or columns: at most most, or that
// rounded up to whole vectors. Few blocks are of equal size, so that each
// thread gets as much as any other: on two threads of the Xeon, 512x2048x130
// takes 27 % less time. Many blocks, and those of one thread, have whole
// vectors.
inline int64_t size_of_a_block(int64_t size, int64_t most) {
  constexpr int64_t vector = 16;
  const int64_t threads = at::get_num_threads();
  const auto blocks = std::max<int64_t>(1, at::divup(size, most));
  const auto equal_blocks =
      std::min(at::divup(blocks, threads) * threads, size / vector);
  return threads > 1 && blocks < 4 * threads && equal_blocks >= blocks
      ? at::divup(size, equal_blocks)
      : at::divup(at::divup(size, vector), blocks) * vector;
}

// The share of n that part i of parts gets.
struct Part {
  int64_t begin;
  int64_t end;

  Part(int64_t n, int64_t i, int64_t parts)
      : begin(n * i / parts), end(n * (i + 1) / parts) {}

  int64_t size() const {
    return end - begin;
  }
};

// The threads that work is worth. Threads that share a processor gain nothing,
// and wait at each barrier until the system lets the others run. OpenMP counts
// the processors, because with OMP_PROC_BIND the system binds each thread to
// one.
inline int64_t threads_worth(int64_t nanoseconds) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const auto worth = std::min(threads, nanoseconds / kNanosecondsWorthAThread);
  if (worth <= 1) {
    return 1;
  }
#ifdef _OPENMP
  const int64_t processors = omp_get_num_procs();
#else
  const int64_t processors = std::thread::hardware_concurrency();
#endif
  return std::clamp<int64_t>(processors, 1, worth);
}

// The L2 cache of a core has so many bytes, or 1 MiB if the system does not
// say.
inline int64_t l2_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? bytes : 1 << 20;
#else
  return 1 << 20;
#endif
}

} // namespace lltm
