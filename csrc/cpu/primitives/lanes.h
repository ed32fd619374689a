#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define LLTM_SHUFFLE __builtin_shufflevector
#endif
#endif

// Vectors of the size of a register, for loops that the compiler does not
// vectorise by itself. gcc keeps larger vectors in memory. Functions take
// vectors by reference, since by value the ABI would change with the
// instruction set.
namespace lltm {

template <typename T, int64_t kBytes>
struct Lanes {
  static constexpr int64_t count = kBytes / sizeof(T);
  typedef T type __attribute__((vector_size(kBytes)));
};

// AVX-512 has 32 registers, AVX2 and SSE have 16. The 32 of ARM are not used.
template <int64_t kBytes>
constexpr bool kHasManyRegisters = kBytes == 64;

template <typename T, typename Lanes>
C10_ALWAYS_INLINE void load_lanes(const T* from, Lanes& lanes) {
  std::memcpy(&lanes, from, sizeof(lanes));
}

template <typename T, typename Lanes>
C10_ALWAYS_INLINE void store_lanes(const Lanes& lanes, T* to) {
  std::memcpy(to, &lanes, sizeof(lanes));
}

// The sum of all lanes, by halves.
template <typename T, int64_t kBytes>
C10_ALWAYS_INLINE T add_lanes(const typename Lanes<T, kBytes>::type& lanes) {
  if constexpr (kBytes == 2 * sizeof(T)) {
    return lanes[0] + lanes[1];
  } else {
    typename Lanes<T, kBytes / 2>::type low, high;
    std::memcpy(&low, &lanes, sizeof(low));
    std::memcpy(
        &high,
        reinterpret_cast<const char*>(&lanes) + sizeof(low),
        sizeof(low));
    low += high;
    return add_lanes<T, kBytes / 2>(low);
  }
}

// The sums of all lanes of each vector, by halves. Four vectors share their
// shuffles, in the same order of additions.
template <typename T, int64_t kBytes, int64_t kCount>
C10_ALWAYS_INLINE void add_lanes_of(
    const typename Lanes<T, kBytes>::type* vectors,
    T* sums) {
#ifdef LLTM_SHUFFLE
  if constexpr (kCount > 4) {
    add_lanes_of<T, kBytes, 4>(vectors, sums);
    return add_lanes_of<T, kBytes, kCount - 4>(vectors + 4, sums + 4);
  } else if constexpr (kCount == 4 && kBytes > 4 * sizeof(T)) {
    typename Lanes<T, kBytes / 2>::type halves[4], upper;
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      const auto* bytes = reinterpret_cast<const char*>(vectors + i);
      std::memcpy(&halves[i], bytes, sizeof(upper));
      std::memcpy(&upper, bytes + sizeof(upper), sizeof(upper));
      halves[i] += upper;
    }
    return add_lanes_of<T, kBytes / 2, 4>(halves, sums);
  } else if constexpr (kCount == 4 && kBytes == 4 * sizeof(T)) {
    const auto a = vectors[0], b = vectors[1], c = vectors[2], d = vectors[3];
    const auto ab =
        LLTM_SHUFFLE(a, b, 0, 4, 1, 5) + LLTM_SHUFFLE(a, b, 2, 6, 3, 7);
    const auto cd =
        LLTM_SHUFFLE(c, d, 0, 4, 1, 5) + LLTM_SHUFFLE(c, d, 2, 6, 3, 7);
    return store_lanes(
        LLTM_SHUFFLE(ab, cd, 0, 1, 4, 5) + LLTM_SHUFFLE(ab, cd, 2, 3, 6, 7),
        sums);
  }
#endif
#pragma GCC unroll 8
  for (int64_t i = 0; i < kCount; ++i) {
    sums[i] = add_lanes<T, kBytes>(vectors[i]);
  }
}

} // namespace lltm
