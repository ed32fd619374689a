// Threads that wait for one another (cpu/primitives/barrier.h) all come back,
// also when one of them fails; and how a sequence is divided among them
// (cpu/lltm_sequence_plan.h), and a product
// (cpu/primitives/product_on_threads.h).

#include "cpu/lltm_sequence_plan.h"
#include "cpu/primitives/barrier.h"
#include "cpu/primitives/product_on_threads.h"

#include <c10/util/Exception.h>

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

// Few, for a step of eight threads takes milliseconds where others share the
// processors.
constexpr int64_t kSteps = 50;

void test_who_fails_lets_the_others_go(int64_t slots, int64_t failing) {
  bool thrown = false;
  try {
    lltm::run_together(
        slots, [&](int64_t begin, int64_t end, lltm::Barrier& barrier) {
          for (int64_t step = 0; step < kSteps; ++step) {
            if (step == kSteps / 2 && begin <= failing && failing < end) {
              throw std::runtime_error("of slot " + std::to_string(failing));
            }
            if (!barrier.wait(end - begin)) {
              return;
            }
          }
        });
  } catch (const std::runtime_error&) {
    thrown = true;
  }
  TORCH_CHECK(thrown, "expected the exception of slot ", failing);
}

lltm::SequencePlan plan_of(
    int64_t batch,
    int64_t flop_of_a_unit,
    int64_t threads,
    bool has_batch_sizes = false) {
  const lltm::CellSizes sizes{batch, /*input_features=*/32, /*state_size=*/168};
  return lltm::plan_of(
      sizes,
      /*steps=*/50,
      has_batch_sizes,
      /*units_per_panel=*/16,
      flop_of_a_unit,
      threads);
}

void test_slots_have_all_rows_and_units_and_are_no_more_than_threads(
    int64_t threads) {
  for (const int64_t flop : {0, 200, 5000, 1000000}) {
    for (const int64_t batch : {1, 8, 24, 800}) {
      for (const bool has_batch_sizes : {false, true}) {
        const auto plan = plan_of(batch, flop, threads, has_batch_sizes);
        TORCH_CHECK(plan.slots() >= 1 && plan.slots() <= threads);
        TORCH_CHECK(plan.unit_groups <= plan.panels);
        TORCH_CHECK(!has_batch_sizes || plan.row_groups == 1);
        int64_t covered = 0;
        for (int64_t slot = 0; slot < plan.slots(); ++slot) {
          covered += plan.rows_of_slot(slot, batch).size() *
              plan.units_of_slot(slot).size();
        }
        TORCH_CHECK(covered == batch * 168);
      }
    }
  }
}

void test_what_is_worth_threads() {
  using Pair = std::pair<int64_t, int64_t>;
  const auto slots = [](int64_t batch, int64_t flop) {
    const auto plan = plan_of(batch, flop, 4);
    return Pair(plan.row_groups, plan.unit_groups);
  };
  TORCH_CHECK(slots(1, 0) == Pair(1, 1));      // too little work
  TORCH_CHECK(slots(1, 5000) == Pair(1, 4));   // units
  TORCH_CHECK(slots(64, 5000) == Pair(2, 2));  // both
  TORCH_CHECK(slots(800, 5000) == Pair(4, 1)); // rows
}

void test_blocks_cover_a_product_and_each_thread_has_one(int64_t threads) {
  const auto cover = [](int64_t blocks, int64_t per_block, int64_t size) {
    return (blocks - 1) * per_block < size && blocks * per_block >= size;
  };
  for (const int64_t M : {1, 63, 65, 385, 600, 6401}) {
    for (const int64_t N : {1, 17, 48, 200, 1000}) {
      const auto plan = lltm::plan_of<float, float>(M, N, /*K=*/100);
      TORCH_CHECK(cover(plan.row_blocks, plan.rows_per_block, M));
      TORCH_CHECK(cover(plan.column_blocks, plan.columns_per_block, N));
      TORCH_CHECK(plan.columns_per_block % plan.columns_per_panel == 0);
      TORCH_CHECK(
          M < 64 * threads || plan.row_blocks * plan.column_blocks >= threads);
    }
  }
}

void test_threads_of_one_processor_are_one() {
  cpu_set_t all, one;
  TORCH_CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
  CPU_ZERO(&one);
  for (int i = 0; CPU_COUNT(&one) == 0; ++i) {
    if (CPU_ISSET(i, &all)) {
      CPU_SET(i, &one);
    }
  }
  TORCH_CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
  const auto threads = lltm::available_threads();
  TORCH_CHECK(sched_setaffinity(0, sizeof(all), &all) == 0);
  TORCH_CHECK(threads == 1, "expected 1 thread, but got ", threads);
}

// With OMP_PROC_BIND each thread, this one too, has a processor of its own.
void test_threads_that_are_bound_are_several() {
  cpu_set_t own, all;
  TORCH_CHECK(sched_getaffinity(0, sizeof(own), &own) == 0);
  TORCH_CHECK(CPU_COUNT(&own) == 1, "OpenMP has not bound this thread");
  TORCH_CHECK(sched_getaffinity(getppid(), sizeof(all), &all) == 0);
  const int64_t expected = std::min(4, CPU_COUNT(&all));
  const auto threads = lltm::available_threads();
  TORCH_CHECK(threads == expected, "expected ", expected, ", got ", threads);
}

} // namespace

int main() {
  for (const int64_t threads : {1, 2, 3, 8}) {
    at::set_num_threads(threads);
    test_slots_have_all_rows_and_units_and_are_no_more_than_threads(threads);
    test_blocks_cover_a_product_and_each_thread_has_one(threads);
    for (const int64_t slots : {threads, 2 * threads}) {
      for (int64_t failing = 0; failing < slots; ++failing) {
        test_who_fails_lets_the_others_go(slots, failing);
      }
    }
  }
  test_what_is_worth_threads();
  at::set_num_threads(4);
  if (std::getenv("OMP_PROC_BIND")) {
    test_threads_that_are_bound_are_several();
  } else {
    test_threads_of_one_processor_are_one();
  }
  return 0;
}
