// Stands before ATen's header of this name in a build with sanitizers.
// ThreadSanitizer does not see how OpenMP's runtime makes threads wait for one
// another, and would report every parallel region: there, each region starts
// and joins threads of its own.

#pragma once

#if !defined(__SANITIZE_THREAD__)
#include_next <ATen/ParallelOpenMP.h>
#else

#define INTRA_OP_PARALLEL

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace at::internal {

template <typename F>
void invoke_parallel(
    int64_t begin,
    int64_t end,
    int64_t grain_size,
    const F& f) {
  int64_t num_threads = at::get_num_threads();
  if (grain_size > 0) {
    num_threads = std::min(num_threads, divup(end - begin, grain_size));
  }
  const auto size = divup(end - begin, num_threads);
  std::vector<std::exception_ptr> failures(num_threads);
  const auto run = [&](int64_t i) {
    const ThreadIdGuard guard(i);
    try {
      if (begin + i * size < end) {
        f(begin + i * size, std::min(end, begin + (i + 1) * size));
      }
    } catch (...) {
      failures[i] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < num_threads; ++i) {
    others.emplace_back(run, i);
  }
  run(0);
  for (auto& other : others) {
    other.join();
  }
  for (const auto& failure : failures) {
    if (failure) {
      std::rethrow_exception(failure);
    }
  }
}

} // namespace at::internal

#endif
