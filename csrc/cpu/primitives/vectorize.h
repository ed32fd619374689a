#pragma once

#include "cpu/primitives/cpu_capability.h"

#include <c10/macros/Macros.h>

#include <cstdint>

// Compiles the body of a loop for each instruction set, and chooses at run time
// by cpu_capability(). It needs no compiler flags for single files: the body is
// plain C++, marked always_inline, and gets the instruction set of the function
// around it. The build with sanitizers has one instruction set.
#if defined(__x86_64__) && defined(__GNUC__) && \
    !defined(LLTM_ONE_INSTRUCTION_SET)
#define LLTM_AVX2 __attribute__((target("avx2,fma,f16c")))
#define LLTM_AVX512                                       \
  __attribute__((target(                                  \
      "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c," \
      "prefer-vector-width=512")))
#endif

namespace lltm {

// A body that is written in vectors, not a loop for the compiler to vectorise,
// is called as body.run<bytes of a register>(begin, end).
template <int64_t kBytes, typename Body>
C10_ALWAYS_INLINE auto call_body(const Body& body, int64_t begin, int64_t end)
    -> decltype(body.template run<kBytes>(begin, end)) {
  body.template run<kBytes>(begin, end);
}

template <int64_t kBytes, typename Body>
C10_ALWAYS_INLINE auto call_body(const Body& body, int64_t begin, int64_t end)
    -> decltype(body(begin, end)) {
  body(begin, end);
}

template <typename Body>
void run_default(const Body& body, int64_t begin, int64_t end) {
  call_body<16>(body, begin, end);
}

#ifdef LLTM_AVX2
template <typename Body>
LLTM_AVX2 void run_avx2(const Body& body, int64_t begin, int64_t end) {
  call_body<32>(body, begin, end);
}

template <typename Body>
LLTM_AVX512 void run_avx512(const Body& body, int64_t begin, int64_t end) {
  call_body<64>(body, begin, end);
}
#endif

template <typename Body>
using Run = void (*)(const Body&, int64_t, int64_t);

template <typename Body>
Run<Body> choose_run() {
#ifdef LLTM_AVX2
  switch (cpu_capability()) {
    case CPUCapability::kAVX512:
      return &run_avx512<Body>;
    case CPUCapability::kAVX2:
      return &run_avx2<Body>;
    case CPUCapability::kDefault:
      break;
  }
#endif
  return &run_default<Body>;
}

// Calls the body for its range. All functions that the body calls have to be
// C10_ALWAYS_INLINE.
template <typename Body>
void vectorized(const Body& body, int64_t begin, int64_t end) {
  static const Run<Body> run = choose_run<Body>();
  run(body, begin, end);
}

} // namespace lltm
