#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

// Between scalar_t and opmath_t, by the bits: a loop around c10's own
// conversions, which copy the struct, does not vectorise.
namespace lltm {

C10_ALWAYS_INLINE double load(const double& from) {
  return from;
}

C10_ALWAYS_INLINE float load(const float& from) {
  return from;
}

C10_ALWAYS_INLINE float load(const c10::BFloat16& from) {
  return c10::detail::f32_from_bits(from.x);
}

C10_ALWAYS_INLINE float load(const c10::Half& from) {
  return c10::detail::fp16_ieee_to_fp32_value(from.x);
}

C10_ALWAYS_INLINE void store(double from, double& to) {
  to = from;
}

C10_ALWAYS_INLINE void store(float from, float& to) {
  to = from;
}

C10_ALWAYS_INLINE void store(float from, c10::BFloat16& to) {
  to.x = c10::detail::round_to_nearest_even(from);
}

C10_ALWAYS_INLINE void store(float from, c10::Half& to) {
  to.x = c10::detail::fp16_ieee_from_fp32_value(from);
}

} // namespace lltm
