// The branches of gate_math.h that only a GPU compiles, beside double. What the
// GPU approximates is moved here by every combination of -2 to 2 ulp.

#include <c10/macros/Macros.h>
#include <c10/util/bit_cast.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>

static int of_division = 0;
static int of_exp = 0;

static float moved(float value, int ulps) {
  return std::isfinite(value) && value != 0
      ? c10::bit_cast<float>(c10::bit_cast<int32_t>(value) + ulps)
      : value;
}

// The reciprocal of 1 and of 2 is exact.
static float __fdividef(float a, float b) {
  return moved(a / b, b == 1 || b == 2 ? 0 : of_division);
}

static float device_exp(float x) {
  return x == 0 ? 1 : moved(std::exp(x), of_exp);
}

#define __CUDA_ARCH__ 900
#define expf device_exp
#include "ops/gate_math.h"

namespace {

int wrong = 0;

void expect(const char* name, float x, float actual, double expected) {
  const double ulps = std::fabs(actual - expected) /
      (std::fabs(expected) * std::numeric_limits<float>::epsilon() +
       std::numeric_limits<float>::denorm_min());
  const bool right = std::isnan(expected) ? std::isnan(actual)
                                          : actual == expected ||
          (ulps <= 8 &&
           std::fabs(actual) <= std::fmax(1.0, std::fabs(expected)));
  if (!right) {
    std::printf("%s(%g) is %g, not %g\n", name, x, actual, expected);
    ++wrong;
  }
}

void check(float x) {
  expect("sigmoid", x, lltm::sigmoid(x), 1 / (1 + std::exp(-double(x))));
  expect("tanh", x, lltm::tanh(x), std::tanh(double(x)));
  const auto cell = lltm::CellMath<float>().forward(0, 0, x, 0);
  expect("elu", x, cell.candidate, x > 0 ? x : std::expm1(double(x)));
}

} // namespace

int main() {
  const float infinity = std::numeric_limits<float>::infinity();
  for (of_division = -2; of_division <= 2; ++of_division) {
    for (of_exp = -2; of_exp <= 2; ++of_exp) {
      for (const float x : {0.0f, infinity, std::nanf("")}) {
        check(x);
        check(-x);
      }
      for (float x = 1e-30f; x < 80; x *= 1.01f) {
        check(x);
        check(-x);
      }
    }
  }
  return wrong > 0;
}
