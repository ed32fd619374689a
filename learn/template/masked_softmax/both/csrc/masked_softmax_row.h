#pragma once

#include "row.h"

#include <cmath>
#include <limits>

// The mathematics: one row, on CPU and CUDA.
namespace my_ops {
namespace {
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
struct MaskedSoftmaxForward {
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
struct MaskedSoftmaxBackward {
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

} // namespace
} // namespace my_ops
