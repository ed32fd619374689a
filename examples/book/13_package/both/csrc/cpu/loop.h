#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
// gcc makes vectors of a loop around exp if it knows that glibc has an exp of vectors. It compiles
// the loop for three kinds of processors, and each takes its own at run time.
extern "C" {
__attribute__((simd("notinbranch"))) double exp(double) noexcept;
__attribute__((simd("notinbranch"))) float expf(float) noexcept;
}
#define VECTORIZED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif

namespace my_ops {
namespace {
template <typename Body>
VECTORIZED void loop(int64_t begin, int64_t end, Body body) {
  for (int64_t i = begin; i < end; ++i) {
    body(i);
  }
}

} // namespace
} // namespace my_ops
