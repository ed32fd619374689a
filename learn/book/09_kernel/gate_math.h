#pragma once

#include <torch/headeronly/macros/Macros.h>
#include <torch/headeronly/util/bit_cast.h>

#include <cmath>
#include <cstdint>

// The functions of the gates, for one hidden unit, on CPU and GPU. A branch that the compiler
// cannot turn into a selection would keep it from computing many units at once.
namespace lltm {

C10_ALWAYS_INLINE C10_HOST_DEVICE double expm1(double x) {
  return std::expm1(x);
}

// exp(x) - 1, as accurate near 0 as elsewhere. std::expm1 is a call, for one number at a time.
C10_ALWAYS_INLINE C10_HOST_DEVICE float expm1(float x) {
#ifdef __CUDA_ARCH__
  return ::expm1f(x);
#else
  // NaN fails both comparisons, and stays.
  x = x < -87.f ? -87.f : x;
  x = x > 88.f ? 88.f : x;
  // x = n * log(2) + r. Adding 1.5 * 2^23 rounds to a whole number, and leaves it in the low bits.
  constexpr float kRound = 12582912.f;
  float shifted = x * 1.44269504f + kRound;
  float n = shifted - kRound;
  float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.f / 5040;
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 1.f / 2;
  p = p * r * r + r;                                                                 // exp(r) - 1
  auto power = c10::bit_cast<float>((c10::bit_cast<uint32_t>(shifted) + 127) << 23); // 2^n
  return power * p + (power - 1);
#endif
}

template <typename T>
C10_ALWAYS_INLINE C10_HOST_DEVICE T sigmoid(T x) {
  return 1 / (2 + expm1(-x));
}

template <typename T>
C10_ALWAYS_INLINE C10_HOST_DEVICE T tanh(T x) {
  T e = expm1(2 * x);
  return e / (e + 2);
}

template <typename T>
C10_ALWAYS_INLINE C10_HOST_DEVICE T elu(T x) {
  T e = expm1(x);
  return x > 0 ? x : e;
}

} // namespace lltm
