#pragma once

#include "cpu/primitives/work.h"

#include <ATen/Parallel.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

// Threads that wait for one another inside one parallel region: a region for
// every step of a sequence would cost more than most steps.
namespace lltm {

// A barrier costs some 200 ns.
constexpr int64_t kNanosecondsWorthABarrier = 500;
// Some 30 us. A thread that has not come to a barrier by then may be waiting
// for this core.
constexpr int kSpinsOfABarrier = 2000;

class Barrier {
 public:
  explicit Barrier(int64_t slots) : slots_(slots), missing_(slots) {}

  // Waits until all slots have come. The caller stands for so many of them.
  // Returns false if a thread has failed: then the others must return.
  bool wait(int64_t slots) {
    if (slots == slots_) {
      return true;
    }
    const auto phase = phase_.load(std::memory_order_relaxed);
    if (missing_.fetch_sub(slots, std::memory_order_acq_rel) == slots) {
      missing_.store(slots_, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return !failed();
    }
    for (int spin = 0; phase_.load(std::memory_order_acquire) == phase;
         ++spin) {
      if (failed()) {
        return false;
      }
      if (spin < kSpinsOfABarrier) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
    return !failed();
  }

  void fail() {
    failed_.store(true, std::memory_order_relaxed);
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
  }

  bool failed() const {
    return failed_.load(std::memory_order_relaxed);
  }

  const int64_t slots_;
  // On cache lines of their own, because waiting threads read only the second.
  alignas(64) std::atomic<int64_t> missing_;
  alignas(64) std::atomic<int64_t> phase_{0};
  std::atomic<bool> failed_{false};
};

// Calls body(begin, end, barrier) on several threads at the same time. The
// threads divide the slots, and may be fewer than the slots: inside of a
// parallel region there is one thread.
template <typename Body>
void run_team(int64_t slots, const Body& body) {
  Barrier barrier(slots);
#if AT_PARALLEL_OPENMP
  at::parallel_for(0, slots, 1, [&](int64_t begin, int64_t end) {
    try {
      body(begin, end, barrier);
    } catch (...) {
      barrier.fail();
      throw;
    }
  });
#else
  // A pool of threads runs its tasks when it can, not all at the same time.
  body(int64_t(0), slots, barrier);
#endif
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

// How the threads divide each step: by the rows of the batch, which needs no
// barrier, then by hidden units.
struct TeamShape {
  int64_t row_groups;
  int64_t unit_groups;

  int64_t slots() const {
    return row_groups * unit_groups;
  }

  // The rows of a step that a slot computes. A step's rows are the first of the
  // batch.
  Part rows(int64_t slot, int64_t batch, int64_t rows_of_step) const {
    Part rows(batch, slot / unit_groups, row_groups);
    rows.end = std::min(rows.end, rows_of_step);
    return rows;
  }

  Part panels(int64_t slot, int64_t panels) const {
    return Part(panels, slot % unit_groups, unit_groups);
  }
};

// The number of processors for the threads of a team. OpenMP counts them,
// because with OMP_PROC_BIND the system binds each thread to one.
inline int64_t num_processors() {
#ifdef _OPENMP
  return omp_get_num_procs();
#else
  return std::thread::hardware_concurrency();
#endif
}

// nanoseconds: of one step on one thread.
inline TeamShape team_shape(
    int64_t nanoseconds,
    int64_t steps,
    int64_t max_row_groups,
    int64_t max_unit_groups) {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  auto worth =
      std::min(threads, nanoseconds * steps / kNanosecondsWorthAThread);
  if (worth > 1) {
    // Threads that share a processor gain nothing, and wait at each barrier
    // until the system lets the others run.
    worth = std::min(worth, std::max<int64_t>(1, num_processors()));
  }
  const auto row_groups = std::max<int64_t>(1, std::min(worth, max_row_groups));
  const auto unit_groups = std::min(
      {worth / row_groups,
       max_unit_groups,
       nanoseconds / row_groups / kNanosecondsWorthABarrier});
  return {row_groups, std::max<int64_t>(1, unit_groups)};
}

// The shape for steps that each multiply with all of the weights for h. A group
// of rows reads all of these weights, so its products should take longer than
// reading them. Fewer rows are enough if the weights fit in the cache of a
// thread. Measured on Zen 5. The rows of a packed sequence become fewer, and
// groups of them would leave threads idle.
template <typename gemm_t, typename Sequence>
TeamShape
shape_for_steps(const Sequence& a, int64_t nanoseconds, int64_t panels) {
  const auto weights_for_h = 3 * a.sizes.state_size * a.sizes.state_size;
  const auto weight_bytes = weights_for_h * int64_t(sizeof(gemm_t));
  const int64_t rows_of_a_group = weight_bytes <= 512 * 1024 ? 8 : 32;
  const auto row_groups = a.packed ? 1 : a.sizes.batch / rows_of_a_group;
  return team_shape(nanoseconds, a.steps.size(), row_groups, panels);
}

// The panel of weights that a step takes as its i-th. The order alternates, so
// a step begins with the panels that the step before it has left in the cache.
// 100x1x512x512 takes 35 % less time on the Xeon.
constexpr int64_t panel_in_turn(int64_t step, int64_t i, int64_t panels) {
  return step % 2 == 0 ? i : panels - 1 - i;
}

} // namespace lltm
