#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>
#include <cstring>

// For loops that the compiler does not vectorise by itself: vectors of 64
// bytes, which it splits where registers are smaller. Functions take them by
// reference, since by value the ABI would change with the instruction set.
namespace lltm {

template <typename T, int64_t kCount = 64 / sizeof(T)>
struct Lanes {
  static constexpr int64_t count = kCount;
  typedef T type __attribute__((vector_size(kCount * sizeof(T))));
};

template <typename T>
C10_ALWAYS_INLINE void load_lanes(
    const T* from,
    typename Lanes<T>::type& lanes) {
  std::memcpy(&lanes, from, sizeof(lanes));
}

template <typename T>
C10_ALWAYS_INLINE void store_lanes(
    const typename Lanes<T>::type& lanes,
    T* to) {
  std::memcpy(to, &lanes, sizeof(lanes));
}

// The sum of all lanes, by halves.
template <typename T, int64_t kCount = Lanes<T>::count>
C10_ALWAYS_INLINE T add_lanes(const typename Lanes<T, kCount>::type& lanes) {
  if constexpr (kCount == 2) {
    return lanes[0] + lanes[1];
  } else {
    typename Lanes<T, kCount / 2>::type low, high;
    std::memcpy(&low, &lanes, sizeof(low));
    std::memcpy(
        &high,
        reinterpret_cast<const char*>(&lanes) + sizeof(low),
        sizeof(low));
    low += high;
    return add_lanes<T, kCount / 2>(low);
  }
}

} // namespace lltm
