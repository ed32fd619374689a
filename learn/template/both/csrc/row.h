#pragma once

#include <torch/headeronly/macros/Macros.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

// The mathematics: one row, on CPU and CUDA. Each has its own Row, in loop.h.
namespace my_ops {

// Half types are computed in float, and rounded once, although a row is read more than once.
template <typename scalar_t>
using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// Contiguous elements, divided into rows. The last row is shorter if columns do not divide them.
struct Rows {
  int64_t elements, columns; // at least 1 column, also of no elements

  C10_HOST_DEVICE int64_t count() const {
    return (elements + columns - 1) / columns;
  }
};

template <typename Row, typename F>
C10_DEVICE C10_ALWAYS_INLINE auto sum(const Row& row, const F& f) {
  return row.reduce(0, f, [](auto a, auto b) { return a + b; });
}

// The softmax of the scores where mask is true, and 0 elsewhere: a function of the element.
template <typename Row, typename scalar_t>
C10_DEVICE C10_ALWAYS_INLINE auto weights(
    const Row& row, const scalar_t* scores, const bool* mask) {
  using opmath = opmath_t<scalar_t>;
  constexpr auto infinity = std::numeric_limits<opmath>::infinity();
  // gcc makes no vectors of bool and float.
  const auto counts = reinterpret_cast<const uint8_t*>(mask);
  const auto x = row.keep([=](int64_t i) {
    const opmath score = scores[i]; // read always: a branch would be slower
    return counts[i] ? score : -infinity;
  });
  const auto largest = row.reduce(-infinity, x, [](auto a, auto b) { return a > b ? a : b; });
  const auto shift = largest == -infinity ? 0 : largest; // no score counts: exp(-infinity)
  // What would be less than the least normal number is 0: the exp of vectors is slow there.
  const opmath least = shift - (std::is_same_v<opmath, double> ? 708 : 87);
  const auto exps = row.keep([=](int64_t i) {
    return (x(i) < least ? 0 : 1) * std::exp((x(i) < least ? least : x(i)) - shift);
  });
  const auto total = sum(row, exps);
  const auto scale = total == 0 ? 0 : 1 / total;
  return [=](int64_t i) { return exps(i) * scale; };
}

template <typename scalar_t>
struct Forward {
  using opmath = opmath_t<scalar_t>;
  const scalar_t* scores;
  const bool* mask;
  scalar_t* result;

  template <typename Row>
  C10_DEVICE C10_ALWAYS_INLINE void operator()(const Row& row) const {
    const auto weight = weights(row, scores, mask);
    row.each([=, *this](int64_t i) { result[i] = weight(i); });
  }
};

template <typename scalar_t>
struct Backward {
  using opmath = opmath_t<scalar_t>;
  const scalar_t *grad, *scores;
  const bool* mask;
  scalar_t* d_scores;

  template <typename Row>
  C10_DEVICE C10_ALWAYS_INLINE void operator()(const Row& row) const {
    const auto weight = weights(row, scores, mask);
    const auto dot = sum(row, [=, *this](int64_t i) { return weight(i) * grad[i]; });
    row.each([=, *this](int64_t i) { d_scores[i] = weight(i) * (grad[i] - dot); });
  }
};

} // namespace my_ops
