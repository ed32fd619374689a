#pragma once

#include <ATen/Version.h>
#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

// Vectors of the size of a register, and loops that are compiled for each
// instruction set and chosen at run time. No compiler flags for single files:
// a body is plain C++, marked always_inline, and gets the instruction set of
// the function around it. The build with sanitizers has one instruction set.
#if defined(__x86_64__) && defined(__GNUC__) && \
    !defined(LLTM_ONE_INSTRUCTION_SET)
#define LLTM_AVX2 __attribute__((target("avx2,fma,f16c")))
#define LLTM_AVX512                                       \
  __attribute__((target(                                  \
      "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c," \
      "prefer-vector-width=512")))
#endif

// Lanes of two vectors, by their numbers. gcc 11 has no
// __builtin_shufflevector.
#define LLTM_SHUFFLE(a, b, ...) \
  __builtin_shuffle(a, b, decltype(a == b){__VA_ARGS__})

namespace lltm {

// Bytes of a vector register, by the instructions that ATen uses, so
// ATEN_CPU_CAPABILITY=default|avx2|avx512 in the environment selects them here,
// too.
inline int64_t vector_bytes() {
  static const int64_t bytes = [] {
    const std::string name = at::get_cpu_capability();
    return name == "AVX512" ? 64 : name == "AVX2" ? 32 : 16;
  }();
  return bytes;
}

// Whatever takes or returns vectors is C10_ALWAYS_INLINE, since the ABI of a call
// depends on the instruction set. gcc keeps larger vectors in memory.
template <typename T, int64_t kBytes>
struct Lanes {
  static constexpr int64_t count = kBytes / sizeof(T);
  typedef T type __attribute__((vector_size(kBytes)));
};

// AVX-512 has 32 registers, AVX2 and SSE have 16. The 32 of ARM are not used.
template <int64_t kBytes>
constexpr bool kHasManyRegisters = kBytes == 64;

template <typename T>
int64_t lanes_of_a_register() {
  return vector_bytes() / int64_t(sizeof(T));
}

template <typename T, typename Lanes>
C10_ALWAYS_INLINE void load_lanes(const T* from, Lanes& lanes) {
  std::memcpy(&lanes, from, sizeof(lanes));
}

template <typename T, typename Lanes>
C10_ALWAYS_INLINE void store_lanes(const Lanes& lanes, T* to) {
  std::memcpy(to, &lanes, sizeof(lanes));
}

// Calls body<vec_t>(i) for [begin, end): with vectors of kBytes, then with ever
// smaller ones, and with T for the last element. No loop is left to the
// vectoriser.
template <typename T, int64_t kBytes, typename Body>
C10_ALWAYS_INLINE void
in_vectors(int64_t begin, int64_t end, const Body& body) {
  constexpr auto lanes = Lanes<T, kBytes>::count;
  using vec_t =
      std::conditional_t<lanes == 1, T, typename Lanes<T, kBytes>::type>;
  for (; end - begin >= lanes; begin += lanes) {
    body.template operator()<vec_t>(begin);
  }
  if constexpr (lanes > 2) {
    in_vectors<T, kBytes / 2>(begin, end, body);
  } else if (lanes == 2 && begin < end) {
    body.template operator()<T>(begin);
  }
}

template <typename Body>
void run_default(const Body& body, int64_t begin, int64_t end) {
  body.template run<16>(begin, end);
}

#ifdef LLTM_AVX2
template <typename Body>
LLTM_AVX2 void run_avx2(const Body& body, int64_t begin, int64_t end) {
  body.template run<32>(begin, end);
}

template <typename Body>
LLTM_AVX512 void run_avx512(const Body& body, int64_t begin, int64_t end) {
  body.template run<64>(begin, end);
}
#endif

// Calls body.run<bytes of a register>(begin, end). All functions that the body
// calls have to be C10_ALWAYS_INLINE.
template <typename Body>
void run_with_best_isa(const Body& body, int64_t begin, int64_t end) {
#ifdef LLTM_AVX2
  switch (vector_bytes()) {
    case 64:
      return run_avx512(body, begin, end);
    case 32:
      return run_avx2(body, begin, end);
  }
#endif
  run_default(body, begin, end);
}

} // namespace lltm
