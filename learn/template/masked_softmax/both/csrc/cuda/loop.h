#pragma once

#include "../row.h"

namespace my_ops {
namespace {
// The elements of a row, divided among the threads of a warp.
template <typename T>
struct Row {
  int64_t begin, end;

  template <typename F>
  __device__ void each(const F& f) const {
    for (int64_t i = begin + threadIdx.x; i < end; i += 32) {
      f(i);
    }
  }

  // Every thread gets the result.
  template <typename F, typename Op>
  __device__ T reduce(T first, const F& f, const Op& op) const {
    each([&](int64_t i) { first = op(first, f(i)); });
    for (int other = 16; other > 0; other /= 2) {
      first = op(first, __shfl_xor_sync(0xffffffff, first, other));
    }
    return first;
  }

  // The function f, computed at each call: a warp has no memory for a row of any length.
  template <typename F>
  __device__ F keep(const F& f) const {
    return f;
  }
};

template <typename Body>
__global__ void loop_kernel(Rows rows, Body body) {
  const int64_t warps = int64_t(gridDim.x) * blockDim.y;
  for (auto i = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; i < rows.count(); i += warps) {
    const auto start = i * rows.columns, stop = start + rows.columns;
    body(Row<typename Body::opmath>{start, stop < rows.elements ? stop : rows.elements});
  }
}

// The stream is the current one: on another one the arguments may not be computed yet.
template <typename Body>
void loop(const Rows& rows, const Body& body, cudaStream_t stream) {
  constexpr int warps = 8;
  // CUDA refuses a launch of no blocks.
  const auto blocks = std::clamp<int64_t>((rows.count() + warps - 1) / warps, 1, 65535);
  loop_kernel<<<blocks, dim3(32, warps), 0, stream>>>(rows, body);
}

} // namespace
} // namespace my_ops
