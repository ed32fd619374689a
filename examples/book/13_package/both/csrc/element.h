#pragma once

#include <torch/headeronly/macros/Macros.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

// The mathematics: one element, on CPU and CUDA.
namespace my_ops {

// Half types are computed in float, and rounded once.
template <typename scalar_t>
using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

template <typename scalar_t>
struct Forward {
  const scalar_t *gate, *value;
  scalar_t* result;

  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(int64_t i) const {
    const opmath_t<scalar_t> x = gate[i];
    result[i] = x / (1 + std::exp(-x)) * value[i];
  }
};

template <typename scalar_t>
struct Backward {
  const scalar_t *grad, *gate, *value;
  scalar_t *d_gate, *d_value;

  C10_HOST_DEVICE C10_ALWAYS_INLINE void operator()(int64_t i) const {
    const opmath_t<scalar_t> x = gate[i];
    const auto s = 1 / (1 + std::exp(-x));
    const auto g = grad[i];
    d_gate[i] = s * (1 + x * (1 - s)) * value[i] * g;
    d_value[i] = x * s * g;
  }
};

} // namespace my_ops
