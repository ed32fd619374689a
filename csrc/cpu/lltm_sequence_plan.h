#pragma once

#include "cpu/lltm_cell.h"
#include "cpu/primitives/work.h"

#include <c10/util/StringUtil.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>

// How a sequence is divided: over threads, and in panels of hidden units.
namespace lltm {

// The share of n that one of several gets.
struct Share {
  int64_t begin;
  int64_t end;

  Share(int64_t n, int64_t i, int64_t shares)
      : begin(n * i / shares), end(n * (i + 1) / shares) {}

  int64_t size() const {
    return end - begin;
  }
};

// A slot is one of row_groups groups of rows by one of unit_groups groups of
// panels, in every step.
// A thread takes one slot, or several where there are fewer threads.
struct SequencePlan {
  int64_t batch;
  int64_t state_size;
  int64_t units_per_panel;
  int64_t panels; // of hidden units
  int64_t row_groups;
  int64_t unit_groups;

  std::string to_string() const {
    return c10::str(
        row_groups,
        " groups of rows, ",
        unit_groups,
        " groups of units, ",
        panels,
        " panels of units");
  }

  int64_t slots() const {
    return row_groups * unit_groups;
  }

  // Whether several slots compute units of the same rows, so threads wait for
  // one another after each step.
  bool needs_barrier() const {
    return unit_groups > 1;
  }

  // The rows of a step that a slot computes. A step's rows are the first of the
  // batch. If steps may have fewer rows than the batch, row_groups is 1.
  Share rows_of_slot(int64_t slot, int64_t rows_of_step) const {
    Share rows(batch, slot / unit_groups, row_groups);
    rows.end = std::min(rows.end, rows_of_step);
    return rows;
  }

  Share panels_of_slot(int64_t slot) const {
    return Share(panels, slot % unit_groups, unit_groups);
  }

  // The hidden units of the panels of a slot.
  Share units_of_slot(int64_t slot) const {
    auto units = panels_of_slot(slot);
    units.begin *= units_per_panel;
    units.end = std::min(units.end * units_per_panel, state_size);
    return units;
  }

  // The hidden units of a panel that are not padding.
  int64_t units_in(int64_t panel) const {
    return std::min(units_per_panel, state_size - panel * units_per_panel);
  }

  // Calls f(panel) for those of a slot. The order alternates, so each turn
  // begins with the panels that the turn before it has left in the cache.
  template <typename F>
  void for_each_panel(int64_t slot, int64_t turn, const F& f) const {
    const auto panels = panels_of_slot(slot);
    for (int64_t i = 0; i < panels.size(); ++i) {
      f(turn % 2 == 0 ? panels.begin + i : panels.end - 1 - i);
    }
  }
};

// To compute the gates of a hidden unit of a row takes so long.
constexpr int64_t kNanosecondsOfGates = 1;
// A barrier takes some 200 ns.
constexpr int64_t kNanosecondsWorthABarrier = 500;
// Threads that divide rows each read all of the weights for h, so the products
// of a group of rows should take longer than reading them.
constexpr int64_t kRowsOfAGroup = 32;

// flop_of_a_unit: of the products of a hidden unit of a row. has_batch_sizes:
// then the rows become fewer, and groups of them would leave threads idle or,
// as rows_of_slot() has it, without rows at all.
inline SequencePlan plan_of(
    const CellSizes& sizes,
    int64_t steps,
    bool has_batch_sizes,
    int64_t units_per_panel,
    int64_t flop_of_a_unit,
    int64_t threads) {
  const auto nanoseconds_of_a_step = sizes.batch * sizes.state_size *
      (flop_of_a_unit / kFlopPerNanosecond + kNanosecondsOfGates);
  const auto useful_threads = std::min(
      threads, nanoseconds_of_a_step * steps / kNanosecondsWorthAThread);
  const auto most_groups = has_batch_sizes ? 1 : sizes.batch / kRowsOfAGroup;
  const auto panels = at::divup(sizes.state_size, units_per_panel);
  const auto row_groups =
      std::max<int64_t>(1, std::min(useful_threads, most_groups));
  const auto unit_groups = std::min(
      {useful_threads / row_groups,
       panels,
       nanoseconds_of_a_step / row_groups / kNanosecondsWorthABarrier});
  return {
      .batch = sizes.batch,
      .state_size = sizes.state_size,
      .units_per_panel = units_per_panel,
      .panels = panels,
      .row_groups = row_groups,
      .unit_groups = std::max<int64_t>(1, unit_groups)};
}

// The threads that may run. Those that share a processor gain nothing, and wait
// at each barrier until the system lets the others run. OpenMP counts the
// processors, because with OMP_PROC_BIND the system binds each thread to one.
inline int64_t available_threads() {
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  if (threads == 1) {
    return 1;
  }
#ifdef _OPENMP
  const int64_t processors = omp_get_num_procs();
#else
  const int64_t processors = std::thread::hardware_concurrency();
#endif
  return std::clamp<int64_t>(processors, 1, threads);
}

} // namespace lltm
