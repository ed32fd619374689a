#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>

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

// AVX-512 has 32 registers, others have 16.
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

} // namespace lltm
