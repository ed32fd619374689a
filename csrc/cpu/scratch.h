#pragma once

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>

namespace lltm {

// Uninitialised memory for a time, aligned to cache lines.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t size)
      : memory_(
            size == 0 ? at::DataPtr()
                      : c10::GetCPUAllocator()->allocate(size * sizeof(T))) {}

  T* data() const {
    return static_cast<T*>(memory_.get());
  }

 private:
  at::DataPtr memory_;
};

// About what a core does, to estimate how long a task takes: products, elements
// copied into another layout, bytes of weights read.
constexpr int64_t kFlopPerNanosecond = 200;
constexpr int64_t kPackedPerNanosecond = 4;
constexpr int64_t kBytesPerNanosecond = 100;

// For at::parallel_for: as many tasks as a thread is worth waking for, which
// costs 1 to 3 us.
inline int64_t grain_size(int64_t nanoseconds_per_task) {
  constexpr int64_t kNanoseconds = 5000;
  return std::max<int64_t>(
      1, kNanoseconds / std::max<int64_t>(1, nanoseconds_per_task));
}

} // namespace lltm
