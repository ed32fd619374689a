#pragma once

#include "ops/gate_math.h"

// The derivatives of the pointwise mathematics of gate_math.h.
namespace lltm {

// The derivative of elu at x, from result = elu(x). For x <= 0 it is exp(x),
// which is result + 1; at 0 it is 1 from both sides. Large x do not overflow,
// because no exponential is computed.
LLTM_INLINE float elu_backward(float result) {
  return at_most(gate_limits.elu_high, result) + 1.0f;
}

LLTM_INLINE double elu_backward(double result) {
  return result > 0 ? 1.0 : result + 1.0;
}

template <typename opmath_t>
struct CellBackward {
  opmath_t d_input_gate;
  opmath_t d_output_gate;
  opmath_t d_candidate;
  opmath_t d_old_cell;
};

// Gradients of the three pre-activations and of the old cell state, from
// tanh(new_cell) and the activated gates.
template <typename opmath_t>
LLTM_INLINE CellBackward<opmath_t> cell_backward(
    opmath_t grad_h,
    opmath_t grad_cell,
    opmath_t t,
    opmath_t i,
    opmath_t o,
    opmath_t g) {
  const opmath_t one(1);
  const opmath_t d_cell = grad_cell + grad_h * o * (one - t * t);
  return {
      .d_input_gate = d_cell * g * i * (one - i),
      .d_output_gate = grad_h * t * o * (one - o),
      .d_candidate = d_cell * i * elu_backward(g),
      .d_old_cell = d_cell};
}

} // namespace lltm
