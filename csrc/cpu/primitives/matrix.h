#pragma once

#include <c10/macros/Macros.h>

#include <cstdint>
#include <type_traits>

namespace lltm {

// A matrix or a part of one, by rows, which lie ld elements apart.
template <typename T>
struct Matrix {
  T* data;
  int64_t ld;

  // The part from a row and a column on.
  C10_ALWAYS_INLINE Matrix at(int64_t row, int64_t column) const {
    return {data + row * ld + column, ld};
  }

  C10_ALWAYS_INLINE T* row(int64_t i) const {
    return data + i * ld;
  }

  template <
      typename U,
      std::enable_if_t<std::is_same_v<U, const T>, bool> = true>
  C10_ALWAYS_INLINE operator Matrix<U>() const {
    return {data, ld};
  }
};

} // namespace lltm
