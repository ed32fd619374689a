#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/bit_cast.h>

#include <cmath>
#include <cstdint>

// The pointwise mathematics of the cell and its derivatives, for one hidden
// unit, in the opmath_t of the caller. CPU and CUDA kernels share it.
//
// On the host the float functions are branchless, so that a loop around them
// vectorises; double, and the GPU, take the C library's.
#define LLTM_INLINE C10_HOST_DEVICE C10_ALWAYS_INLINE

namespace lltm {

// x = n * ln(2) + r with an integer n and |r| <= ln(2) / 2, for |x| < 2^21.
struct ExpReduction {
  int32_t n;
  float r;
};

LLTM_INLINE ExpReduction reduce_for_exp(float x) {
  // Adding 1.5 * 2^23 leaves the nearest integer in the low bits of the sum:
  // unlike rintf, this has an instruction in every instruction set.
  constexpr float kRound = 12582912.0f;
  const float shifted = x * 1.44269504088896341f + kRound;
  const float n = shifted - kRound;
  // ln(2) in two parts (Cephes): n times the first is exact.
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  // Unsigned: the bits of a NaN may be any, and a signed overflow is undefined.
  const auto bits =
      c10::bit_cast<uint32_t>(shifted) - c10::bit_cast<uint32_t>(kRound);
  return {static_cast<int32_t>(bits), r};
}

// exp(r) - 1 for |r| <= ln(2) / 2, minimax (Cephes expf), within 1 ulp.
LLTM_INLINE float expm1_polynomial(float r) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r;
}

LLTM_INLINE float exp2_of(int32_t n) {
  return c10::bit_cast<float>((static_cast<uint32_t>(n) + 127u) << 23);
}

// Written so that NaN passes.
LLTM_INLINE float clamp(float x, float low, float high) {
  const float at_least = x < low ? low : x;
  return at_least > high ? high : at_least;
}

LLTM_INLINE float exp(float x) {
#ifdef __CUDA_ARCH__
  return ::expf(x);
#else
  // Beyond, the result is 0 or inf. Two factors, for results that are subnormal
  // or overflow.
  const auto [n, r] = reduce_for_exp(clamp(x, -105.0f, 90.0f));
  const int32_t half = n >> 1;
  return (1.0f + expm1_polynomial(r)) * exp2_of(half) * exp2_of(n - half);
#endif
}

// Only for x <= 40, where the result is far from overflow.
LLTM_INLINE float expm1(float x) {
#ifdef __CUDA_ARCH__
  return ::expm1f(x);
#else
  // Below -40 the result is -1.
  const auto [n, r] = reduce_for_exp(clamp(x, -40.0f, 40.0f));
  const float scale = exp2_of(n);
  return expm1_polynomial(r) * scale + (scale - 1.0f);
#endif
}

LLTM_INLINE float tanh(float x) {
#ifdef __CUDA_ARCH__
  return ::tanhf(x);
#else
  // From 10 on the result rounds to 1. Odd, through expm1: no cancellation.
  const float e = expm1(2.0f * clamp(std::fabs(x), 0.0f, 10.0f));
  return std::copysign(e / (e + 2.0f), x);
#endif
}

LLTM_INLINE double exp(double x) {
  return ::exp(x);
}

LLTM_INLINE double expm1(double x) {
  return ::expm1(x);
}

LLTM_INLINE double tanh(double x) {
  return ::tanh(x);
}

template <typename opmath_t>
LLTM_INLINE opmath_t sigmoid(opmath_t x) {
  return opmath_t(1) / (opmath_t(1) + lltm::exp(-x));
}

// alpha = 1. expm1, not exp - 1, whose relative error near 0 is unbounded.
template <typename opmath_t>
LLTM_INLINE opmath_t elu(opmath_t x) {
  const opmath_t negative = lltm::expm1(x < opmath_t(0) ? x : -x);
  return x > opmath_t(0) ? x : negative;
}

// d elu(x) / dx by its result: exp(x) = elu(x) + 1 for x <= 0, also at 0, where
// the derivative is 1 from both sides, and without overflow for large x.
template <typename opmath_t>
LLTM_INLINE opmath_t elu_backward(opmath_t result) {
  return result > opmath_t(0) ? opmath_t(1) : result + opmath_t(1);
}

template <typename opmath_t>
struct CellForward {
  opmath_t input_gate;
  opmath_t output_gate;
  opmath_t candidate;
  opmath_t new_cell;
  opmath_t new_h;
};

// From the three pre-activations and the old cell state.
template <typename opmath_t>
LLTM_INLINE CellForward<opmath_t> cell_forward(
    opmath_t input_gate,
    opmath_t output_gate,
    opmath_t candidate,
    opmath_t old_cell) {
  const opmath_t i = sigmoid(input_gate);
  const opmath_t o = sigmoid(output_gate);
  const opmath_t g = elu(candidate);
  const opmath_t new_cell = old_cell + g * i;
  return {i, o, g, new_cell, lltm::tanh(new_cell) * o};
}

template <typename opmath_t>
struct CellBackward {
  opmath_t d_input_gate;
  opmath_t d_output_gate;
  opmath_t d_candidate;
  opmath_t d_old_cell;
};

// Gradients of the three pre-activations and of the old cell state, from the
// activated gates.
template <typename opmath_t>
LLTM_INLINE CellBackward<opmath_t> cell_backward(
    opmath_t grad_h,
    opmath_t grad_cell,
    opmath_t new_cell,
    opmath_t i,
    opmath_t o,
    opmath_t g) {
  const opmath_t one(1);
  const opmath_t t = lltm::tanh(new_cell);
  const opmath_t d_cell = grad_cell + grad_h * o * (one - t * t);
  return {
      d_cell * g * i * (one - i),
      grad_h * t * o * (one - o),
      d_cell * i * elu_backward(g),
      d_cell};
}

} // namespace lltm
