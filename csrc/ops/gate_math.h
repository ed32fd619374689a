#pragma once

#include <c10/macros/Macros.h>

#include <cmath>

// The pointwise mathematics of the cell and its derivatives, for one hidden
// unit, in the opmath_t of the caller. CPU and CUDA kernels share it.
namespace lltm {

template <typename opmath_t>
struct CellForward {
  opmath_t input_gate;
  opmath_t output_gate;
  opmath_t candidate;
  opmath_t new_cell;
  opmath_t new_h;
};

template <typename opmath_t>
struct CellBackward {
  opmath_t d_input_gate;
  opmath_t d_output_gate;
  opmath_t d_candidate;
  opmath_t d_old_cell;
};

template <typename opmath_t>
C10_HOST_DEVICE inline opmath_t sigmoid(opmath_t x) {
  return opmath_t(1) / (opmath_t(1) + std::exp(-x));
}

// alpha = 1. expm1, not exp - 1, whose relative error near 0 is unbounded.
template <typename opmath_t>
C10_HOST_DEVICE inline opmath_t elu(opmath_t x) {
  return x > opmath_t(0) ? x : std::expm1(x);
}

// d elu(x) / dx by its result: exp(x) = elu(x) + 1 for x <= 0, also at 0, where
// the derivative is 1 from both sides, and without overflow for large x.
template <typename opmath_t>
C10_HOST_DEVICE inline opmath_t elu_backward(opmath_t result) {
  return result > opmath_t(0) ? opmath_t(1) : result + opmath_t(1);
}

// From the three pre-activations and the old cell state.
template <typename opmath_t>
C10_HOST_DEVICE inline CellForward<opmath_t> cell_forward(
    opmath_t input_gate,
    opmath_t output_gate,
    opmath_t candidate,
    opmath_t old_cell) {
  CellForward<opmath_t> out;
  out.input_gate = sigmoid(input_gate);
  out.output_gate = sigmoid(output_gate);
  out.candidate = elu(candidate);
  out.new_cell = old_cell + out.candidate * out.input_gate;
  out.new_h = std::tanh(out.new_cell) * out.output_gate;
  return out;
}

// Gradients of the three pre-activations and of the old cell state, from the
// activated gates.
template <typename opmath_t>
C10_HOST_DEVICE inline CellBackward<opmath_t> cell_backward(
    opmath_t grad_h,
    opmath_t grad_cell,
    opmath_t new_cell,
    opmath_t input_gate,
    opmath_t output_gate,
    opmath_t candidate) {
  const opmath_t one(1);
  const opmath_t t = std::tanh(new_cell);
  CellBackward<opmath_t> out;
  out.d_old_cell = grad_cell + grad_h * output_gate * (one - t * t);
  out.d_input_gate =
      out.d_old_cell * candidate * input_gate * (one - input_gate);
  out.d_output_gate = grad_h * t * output_gate * (one - output_gate);
  out.d_candidate = out.d_old_cell * input_gate * elu_backward(candidate);
  return out;
}

} // namespace lltm
