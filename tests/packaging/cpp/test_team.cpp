// Threads that wait for one another (cpu/primitives/barrier.h) all come back,
// also when one of them fails; and how many there are
// (cpu/lltm_sequence_team.h).

#include "cpu/lltm_gates.h"
#include "cpu/lltm_sequence_team.h"
#include "cpu/primitives/barrier.h"

#include <c10/util/Exception.h>

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

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

struct Sequence {
  lltm::CellSizes sizes;
  std::vector<int> steps = std::vector<int>(50);
  bool has_batch_sizes = false;
};

lltm::Team<float> team_of(int64_t batch, int64_t flop_of_a_unit) {
  const Sequence sequence{{batch, 32, 160}};
  return {sequence, /*units_of_a_panel=*/16, flop_of_a_unit};
}

void test_a_team_has_no_more_slots_than_threads(int64_t threads) {
  for (const int64_t flop : {0, 200, 5000, 1000000}) {
    for (const int64_t batch : {1, 8, 24, 800}) {
      const auto team = team_of(batch, flop);
      TORCH_CHECK(team.slots() >= 1 && team.slots() <= threads);
      TORCH_CHECK(team.row_groups() <= std::max<int64_t>(1, batch / 8));
      TORCH_CHECK(team.slots() <= 10 * team.row_groups());
    }
  }
}

void test_threads_of_one_processor_are_no_team() {
  cpu_set_t all, one;
  TORCH_CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
  CPU_ZERO(&one);
  for (int i = 0; CPU_COUNT(&one) == 0; ++i) {
    if (CPU_ISSET(i, &all)) {
      CPU_SET(i, &one);
    }
  }
  TORCH_CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
  const auto slots = team_of(32, 1000000).slots();
  TORCH_CHECK(sched_setaffinity(0, sizeof(all), &all) == 0);
  TORCH_CHECK(slots == 1, "expected 1 slot, but got ", slots);
}

// With OMP_PROC_BIND each thread, this one too, has a processor of its own.
void test_threads_that_are_bound_are_a_team() {
  cpu_set_t own, all;
  TORCH_CHECK(sched_getaffinity(0, sizeof(own), &own) == 0);
  TORCH_CHECK(CPU_COUNT(&own) == 1, "OpenMP has not bound this thread");
  TORCH_CHECK(sched_getaffinity(getppid(), sizeof(all), &all) == 0);
  const int64_t expected = std::min(4, CPU_COUNT(&all));
  const auto slots = team_of(32, 1000000).slots();
  TORCH_CHECK(slots == expected, "expected ", expected, ", but got ", slots);
}

} // namespace

int main() {
  for (const int64_t threads : {1, 2, 3, 8}) {
    at::set_num_threads(threads);
    test_a_team_has_no_more_slots_than_threads(threads);
    for (const int64_t slots : {threads, 2 * threads}) {
      for (int64_t failing = 0; failing < slots; ++failing) {
        test_who_fails_lets_the_others_go(slots, failing);
      }
    }
  }
  at::set_num_threads(4);
  if (std::getenv("OMP_PROC_BIND")) {
    test_threads_that_are_bound_are_a_team();
  } else {
    test_threads_of_one_processor_are_no_team();
  }
  return 0;
}
