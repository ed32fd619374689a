#pragma once

#include "../row.h"

#include <numeric>
#include <vector>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
// gcc makes vectors of a loop around exp if it knows that glibc has an exp of vectors. It compiles
// the loop for three kinds of processors, and each takes its own at run time.
extern "C" {
__attribute__((simd("notinbranch"))) double exp(double) noexcept;
__attribute__((simd("notinbranch"))) float expf(float) noexcept;
}
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif

namespace my_ops {
namespace {
// The elements of a row, one after the other.
template <typename T>
struct Row {
  int64_t begin, end;
  T* buffer;

  template <typename F>
  C10_ALWAYS_INLINE void each(const F& f) const {
    for (int64_t i = begin; i < end; ++i) {
      f(i);
    }
  }

  // In 16 sums, because a compiler must not change the order of one.
  template <typename F, typename Op>
  C10_ALWAYS_INLINE T reduce(T first, const F& f, const Op& op) const {
    constexpr int64_t lanes = 16;
    T results[lanes];
    std::fill_n(results, lanes, first);
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      for (int64_t lane = 0; lane < lanes; ++lane) {
        results[lane] = op(results[lane], f(i + lane));
      }
    }
    for (; i < end; ++i) {
      first = op(first, f(i));
    }
    return std::accumulate(results, results + lanes, first, op);
  }

  // The function f, computed once for each element. In a loop of nothing else, because gcc makes
  // vectors of exp in no other.
  template <typename F>
  C10_ALWAYS_INLINE auto keep(const F& f) const {
    each([=, *this](int64_t i) { buffer[i - begin] = f(i); });
    return [=, *this](int64_t i) { return buffer[i - begin]; };
  }
};

template <typename Body>
VECTORIZED void loop(const Rows& rows, int64_t begin, int64_t end, Body body) {
  using T = typename Body::opmath;
  std::vector<T> buffer(rows.columns);
  for (int64_t i = begin; i < end; ++i) {
    const auto start = i * rows.columns, stop = std::min(start + rows.columns, rows.elements);
    body(Row<T>{start, stop, buffer.data()});
  }
}

} // namespace
} // namespace my_ops
