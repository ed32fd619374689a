#pragma once

#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>

// The pointwise part of a step forward, between the GEMMs.
namespace lltm {

constexpr int kThreads = 256;

// Rows of the batch along y, hidden units along x, in strides of the grid:
// grid.y ends at 65535, and no index needs a division.
inline dim3 grid_for(int64_t batch, int64_t state_size) {
  const auto blocks_x = (state_size + kThreads - 1) / kThreads;
  return dim3(
      static_cast<unsigned>(std::min<int64_t>(blocks_x, 65535)),
      static_cast<unsigned>(std::min<int64_t>(batch, 65535)));
}

// gates holds the pre-activations, and takes the activated gates if
// write_gates.
template <typename scalar_t, bool write_gates>
C10_LAUNCH_BOUNDS_1(kThreads)
__global__ void forward_kernel_device(
    int64_t batch,
    int64_t state_size,
    scalar_t* __restrict__ gates,
    const scalar_t* __restrict__ old_cell,
    scalar_t* __restrict__ new_h,
    scalar_t* __restrict__ new_cell) {
  using opmath_t = at::opmath_type<scalar_t>;
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t row = blockIdx.y; row < batch; row += gridDim.y) {
    scalar_t* const input_gate = gates + row * 3 * state_size;
    scalar_t* const output_gate = input_gate + state_size;
    scalar_t* const candidate = output_gate + state_size;
    for (int64_t i = first; i < state_size; i += stride) {
      const int64_t unit = row * state_size + i;
      const auto out = cell_forward<opmath_t>(
          input_gate[i], output_gate[i], candidate[i], old_cell[unit]);
      new_h[unit] = out.new_h;
      new_cell[unit] = out.new_cell;
      if constexpr (write_gates) {
        input_gate[i] = out.input_gate;
        output_gate[i] = out.output_gate;
        candidate[i] = out.candidate;
      }
    }
  }
}

} // namespace lltm
