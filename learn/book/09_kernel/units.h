#pragma once

#include <type_traits>

#include "gate_math.h"

// What a kernel computes for one hidden unit. Rows are contiguous here.
namespace lltm {

// Half types are computed in float.
template <typename scalar_t>
using opmath_type = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// Turns the pre-activations of a unit into its gates, and computes its new state.
template <typename scalar_t>
struct ForwardUnit {
  scalar_t* gates;
  const scalar_t* old_cell;
  scalar_t* new_h;
  scalar_t* new_cell;
  int64_t size;

  C10_ALWAYS_INLINE C10_HOST_DEVICE void operator()(int64_t row, int64_t unit) const {
    using opmath_t = opmath_type<scalar_t>;
    auto k = row * size + unit;
    auto* p = gates + 3 * row * size + unit;
    auto i = sigmoid<opmath_t>(p[0]);
    auto o = sigmoid<opmath_t>(p[size]);
    auto g = elu<opmath_t>(p[2 * size]);
    opmath_t cell = old_cell[k] + g * i;
    new_h[k] = tanh(cell) * o;
    new_cell[k] = cell;
    p[0] = i, p[size] = o, p[2 * size] = g;
  }
};

// Turns the gates of a unit into the gradients of its pre-activations.
template <typename scalar_t>
struct BackwardUnit {
  scalar_t* gates;
  const scalar_t* new_cell;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  scalar_t* d_old_cell;
  int64_t size;

  C10_ALWAYS_INLINE C10_HOST_DEVICE void operator()(int64_t row, int64_t unit) const {
    using opmath_t = opmath_type<scalar_t>;
    auto k = row * size + unit;
    auto* p = gates + 3 * row * size + unit;
    opmath_t i = p[0], o = p[size], g = p[2 * size], d_h = grad_h[k];
    auto t = tanh<opmath_t>(new_cell[k]);
    auto d_cell = grad_cell[k] + d_h * o * (1 - t * t);
    d_old_cell[k] = d_cell;
    p[0] = d_cell * g * i * (1 - i);
    p[size] = d_h * t * o * (1 - o);
    p[2 * size] = d_cell * i * (g > 0 ? opmath_t(1) : g + 1);
  }
};
} // namespace lltm
