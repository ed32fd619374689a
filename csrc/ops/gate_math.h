#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/bit_cast.h>

#include <cmath>
#include <cstdint>

// The pointwise mathematics of the cell, for one hidden unit, in the opmath_t
// of the caller, and its derivatives. CPU and CUDA kernels share it.
//
// The float functions are branchless: a loop around them vectorises on the
// host, and a GPU takes fewer instructions than for those of the C library,
// which double takes.
#define LLTM_INLINE C10_HOST_DEVICE C10_ALWAYS_INLINE

namespace lltm {

// The input gate, the output gate and the candidate, in this order.
constexpr int64_t kGates = 3;

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

// exp(r) - 1 for |r| <= ln(2) / 2, minimax (Cephes expf), within 1 ulp. Terms
// are taken in pairs, which makes the chain of operations shorter than
// Horner's.
LLTM_INLINE float expm1_polynomial(float r) {
  const float r2 = r * r;
  const float p01 = 1.9875691500e-4f * r + 1.3981999507e-3f;
  const float p23 = 8.3334519073e-3f * r + 4.1665795894e-2f;
  const float p45 = 1.6666665459e-1f * r + 5.0000001201e-1f;
  return ((p01 * r2 + p23) * r2 + p45) * r2 + r;
}

// 2^n for -127 < n < 128.
LLTM_INLINE float exp2_of(int32_t n) {
  return c10::bit_cast<float>((static_cast<uint32_t>(n) + 127u) << 23);
}

// The limits that arguments are clamped to. Beyond a limit the result is
// constant, or for elu above 0 the argument itself. The limits are variables,
// because gcc 12 knows the result at a constant limit, and jumps to it. In a
// loop it makes compares and blends of the jumps, if it vectorises the loop at
// all, and a unit takes 1.5 to 1.8 times as long.
struct GateLimits {
  float sigmoid_low = -105.0f;
  float sigmoid_high = 40.0f;
  float elu_low = -40.0f;
  float elu_high = 0.0f;
  float tanh_high = 10.0f;
};
#ifdef __CUDA_ARCH__
constexpr GateLimits gate_limits;
#else
inline GateLimits gate_limits;
#endif

// Both pass NaN.
LLTM_INLINE float at_least(float low, float x) {
  return low > x ? low : x;
}

LLTM_INLINE float at_most(float high, float x) {
  return high < x ? high : x;
}

// exp(x) - 1 for |x| <= 40.
LLTM_INLINE float expm1_within_limits(float x) {
  const auto [n, r] = reduce_for_exp(x);
  const float scale = exp2_of(n);
  return expm1_polynomial(r) * scale + (scale - 1.0f);
}

LLTM_INLINE float sigmoid(float x) {
#ifdef __CUDA_ARCH__
  const float e = ::expf(-::fabsf(x)); // at most 1: it cannot overflow
  return __fdividef(x < 0 ? e : 1.0f, 1.0f + e); // within 2 ulp, no branch
#else
  // exp(-x) reaches 2^152: both sides of the fraction are taken times 2^-32.
  constexpr int32_t kShift = 32;
  const auto [n, r] = reduce_for_exp(
      -at_most(gate_limits.sigmoid_high, at_least(gate_limits.sigmoid_low, x)));
  const float one = exp2_of(-kShift);
  return one / (one + (1.0f + expm1_polynomial(r)) * exp2_of(n - kShift));
#endif
}

// alpha = 1. expm1, not exp - 1, whose relative error near 0 is unbounded.
LLTM_INLINE float elu(float x) {
  // One of the two is 0.
  return at_least(gate_limits.elu_high, x) +
      expm1_within_limits(
             at_most(gate_limits.elu_high, at_least(gate_limits.elu_low, x)));
}

LLTM_INLINE float tanh(float x) {
  // Odd, through expm1: no cancellation.
  const float e =
      expm1_within_limits(2.0f * at_most(gate_limits.tanh_high, std::fabs(x)));
#ifdef __CUDA_ARCH__
  const float t = at_most(1.0f, __fdividef(e, e + 2.0f));
#else
  const float t = e / (e + 2.0f);
#endif
  return std::copysign(t, x);
}

LLTM_INLINE double sigmoid(double x) {
  return 1.0 / (1.0 + ::exp(-x));
}

LLTM_INLINE double elu(double x) {
  return x > 0 ? x : ::expm1(x);
}

LLTM_INLINE double tanh(double x) {
  return ::tanh(x);
}

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
struct CellForward {
  opmath_t input_gate, output_gate, candidate, new_cell, new_h;
};

template <typename opmath_t>
struct CellBackward {
  opmath_t d_input_gate, d_output_gate, d_candidate, d_old_cell;
};

// The formulas of a unit. A number that becomes an argument of the operators is
// a member here; kernels only carry it to where they call the formulas.
template <typename opmath_t>
struct CellMath {
  CellMath() = default;

  template <typename Arguments>
  explicit CellMath(const Arguments& /*arguments*/) {}

  // From the three pre-activations and the old cell state.
  LLTM_INLINE CellForward<opmath_t> forward(
      opmath_t input_gate,
      opmath_t output_gate,
      opmath_t candidate,
      opmath_t old_cell) const {
    const opmath_t i = sigmoid(input_gate);
    const opmath_t o = sigmoid(output_gate);
    const opmath_t g = elu(candidate);
    const opmath_t new_cell = old_cell + g * i;
    return {
        .input_gate = i,
        .output_gate = o,
        .candidate = g,
        .new_cell = new_cell,
        .new_h = lltm::tanh(new_cell) * o};
  }

  // Gradients of the three pre-activations and of the old cell state, from
  // tanh(new_cell) and the activated gates.
  LLTM_INLINE CellBackward<opmath_t> backward(
      opmath_t grad_h,
      opmath_t grad_cell,
      opmath_t t,
      opmath_t i,
      opmath_t o,
      opmath_t g) const {
    const opmath_t one(1);
    const opmath_t d_cell = grad_cell + grad_h * o * (one - t * t);
    return {
        .d_input_gate = d_cell * g * i * (one - i),
        .d_output_gate = grad_h * t * o * (one - o),
        .d_candidate = d_cell * i * elu_backward(g),
        .d_old_cell = d_cell};
  }
};

} // namespace lltm
