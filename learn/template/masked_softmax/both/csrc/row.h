#pragma once

#include <torch/headeronly/macros/Macros.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// What kernels that compute whole rows share. CPU and CUDA each have a Row of their own, in loop.h.
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

} // namespace my_ops
