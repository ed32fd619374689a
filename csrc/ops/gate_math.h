#pragma once

#include <c10/macros/Macros.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

// The pointwise mathematics of the cell and its derivatives, in the opmath_t of
// the caller. CPU and CUDA kernels share it.
//
// T is the float of one hidden unit or, on a CPU, a vector of those of several
// (cpu/primitives/registers.h). A GPU takes fewer instructions than for the
// functions of the C library, which double takes.
#define LLTM_INLINE C10_HOST_DEVICE C10_ALWAYS_INLINE

namespace lltm {

// The input gate, the output gate and the candidate, in this order.
constexpr int64_t kGates = 3;

template <typename T>
struct BitsOf {
  typedef uint32_t type __attribute__((vector_size(sizeof(T))));
};
template <>
struct BitsOf<float> {
  using type = uint32_t;
};
template <typename T>
using Bits = typename BitsOf<T>::type;

template <typename To, typename From>
LLTM_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Without it, gcc compares and blends in place of one maximum or minimum,
// because it knows the limit.
LLTM_INLINE float hide(float limit) {
#ifndef __CUDA_ARCH__
  __asm__("" : "+r"(limit));
#endif
  return limit;
}

// Both pass NaN.
template <typename T>
LLTM_INLINE T at_least(float low, T x) {
  low = hide(low);
  return low > x ? low : x;
}

template <typename T>
LLTM_INLINE T at_most(float high, T x) {
  high = hide(high);
  return high < x ? high : x;
}

// exp(x) = 2^n * (1 + p), for |x| < 2^14. n is in the low bits of an integer.
template <typename T>
struct ExpParts {
  Bits<T> n;
  T p;
};

template <typename T>
LLTM_INLINE ExpParts<T> exp_parts(T x) {
  // x = n * ln(2) + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 leaves the
  // nearest integer in the low bits of the sum: unlike rintf, this has an
  // instruction in every instruction set.
  constexpr float kRound = 12582912.0f;
  const T shifted = x * 1.44269504088896341f + kRound;
  const T n = shifted - kRound;
  // ln(2) in two parts (Cephes): n times the first is exact.
  const T r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  // exp(r) - 1, minimax (Cephes expf), within 1 ulp. Terms are taken in pairs,
  // which makes the chain of operations shorter than Horner's.
  const T r2 = r * r;
  const T p01 = 1.9875691500e-4f * r + 1.3981999507e-3f;
  const T p23 = 8.3334519073e-3f * r + 4.1665795894e-2f;
  const T p45 = 1.6666665459e-1f * r + 5.0000001201e-1f;
  return {
      .n = bit_cast<Bits<T>>(shifted),
      .p = ((p01 * r2 + p23) * r2 + p45) * r2 + r};
}

// 2^n for -127 < n < 128.
template <typename T>
LLTM_INLINE T exp2_of(Bits<T> n) {
  return bit_cast<T>((n + 127u) << 23);
}

// exp(x) - 1 for |x| <= 40.
template <typename T>
LLTM_INLINE T expm1_within_limits(T x) {
  const auto [n, p] = exp_parts(x);
  const T scale = exp2_of<T>(n);
  return p * scale + (scale - 1.0f);
}

template <typename T>
LLTM_INLINE T sigmoid(T x) {
#ifdef __CUDA_ARCH__
  const float e = ::expf(-::fabsf(x)); // at most 1: it cannot overflow
  return __fdividef(x < 0 ? e : 1.0f, 1.0f + e); // within 2 ulp, no branch
#else
  // Beyond the limits the result is constant. exp(-x) reaches 2^152: both sides
  // of the fraction are taken times 2^-32.
  constexpr uint32_t kShift = 32;
  constexpr float kOne = 0x1p-32f;
  const auto [n, p] = exp_parts(-at_most(40.0f, at_least(-105.0f, x)));
  return kOne / (kOne + (1.0f + p) * exp2_of<T>(n - kShift));
#endif
}

// alpha = 1. expm1, not exp - 1, whose relative error near 0 is unbounded.
template <typename T>
LLTM_INLINE T elu(T x) {
  // One of the two is 0.
  return at_least(0.0f, x) +
      expm1_within_limits(at_most(0.0f, at_least(-40.0f, x)));
}

template <typename T>
LLTM_INLINE T absolute(T x) {
#ifdef __CUDA_ARCH__
  return ::fabsf(x); // takes no instruction
#else
  return bit_cast<T>(bit_cast<Bits<T>>(x) & 0x7fffffffu);
#endif
}

template <typename T>
LLTM_INLINE T tanh(T x) {
  // Odd, through expm1: no cancellation. It is 1 from 10 on.
  const T e = expm1_within_limits(2.0f * at_most(10.0f, absolute(x)));
#ifdef __CUDA_ARCH__
  const T t = at_most(1.0f, __fdividef(e, e + 2.0f));
#else
  const T t = e / (e + 2.0f);
#endif
  const auto sign = bit_cast<Bits<T>>(x) & 0x80000000u;
  return bit_cast<T>(bit_cast<Bits<T>>(t) | sign);
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
template <typename T>
LLTM_INLINE T elu_backward(T result) {
  return at_most(0.0f, result) + 1.0f;
}

LLTM_INLINE double elu_backward(double result) {
  return result > 0 ? 1.0 : result + 1.0;
}

// The activated gates and the new states of a unit.
template <typename T>
struct UnitResults {
  T input_gate, output_gate, candidate, new_cell, new_h;
};

// The gradients of the pre-activations (pre_) and of the old cell state.
template <typename T>
struct UnitGradients {
  T d_pre_i, d_pre_o, d_pre_g, d_old_cell;
};

// The formulas of a unit. A number that becomes an argument of the operators is
// a member here, an opmath_t; kernels only carry it to where they call the
// formulas.
template <typename T, typename opmath_t = T>
struct CellMath {
  CellMath() = default;

  // From the arguments of an operator, or the CellMath of another T.
  template <typename Arguments>
  explicit CellMath(const Arguments& /*arguments*/) {}

  // From the three pre-activations and the old cell state.
  LLTM_INLINE UnitResults<T> forward(T pre_i, T pre_o, T pre_g, T old_cell)
      const {
    const T i = sigmoid(pre_i);
    const T o = sigmoid(pre_o);
    const T g = elu(pre_g);
    const T new_cell = old_cell + g * i;
    return {
        .input_gate = i,
        .output_gate = o,
        .candidate = g,
        .new_cell = new_cell,
        .new_h = lltm::tanh(new_cell) * o};
  }

  // From tanh(new_cell) and the activated gates.
  LLTM_INLINE UnitGradients<T>
  backward(T grad_h, T grad_cell, T t, T i, T o, T g) const {
    const T d_cell = grad_cell + grad_h * o * (1 - t * t);
    return {
        .d_pre_i = d_cell * g * i * (1 - i),
        .d_pre_o = grad_h * t * o * (1 - o),
        .d_pre_g = d_cell * i * elu_backward(g),
        .d_old_cell = d_cell};
  }
};

} // namespace lltm
