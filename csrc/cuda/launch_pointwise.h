#pragma once

#include "ops/gate_math.h"

#include <algorithm>
#include <cstdint>

// How the threads of a grid divide rows by columns, and the launch of such a
// grid. Compiles for the host too, where tests run it.
namespace lltm {

constexpr int kPointwiseThreads = 256;

struct Grid {
  unsigned columns;
  unsigned rows;
};

// Threads stride over rows and columns by the grid, so no index needs a
// division. Neither side is larger than 65535, the limit of gridDim.y.
inline Grid grid_for(int64_t rows, int64_t columns) {
  constexpr int64_t kMost = 65535;
  const auto blocks = (columns + kPointwiseThreads - 1) / kPointwiseThreads;
  return {
      static_cast<unsigned>(std::min(blocks, kMost)),
      static_cast<unsigned>(std::min(rows, kMost))};
}

// Calls body(row, column) for the elements of one thread.
template <typename Body>
LLTM_INLINE void for_each_of_thread(
    Grid grid,
    Grid block,
    int thread,
    int64_t rows,
    int64_t columns,
    const Body& body) {
  const int64_t first = int64_t(block.columns) * kPointwiseThreads + thread;
  const int64_t stride = int64_t(grid.columns) * kPointwiseThreads;
  for (int64_t row = block.rows; row < rows; row += grid.rows) {
    for (int64_t column = first; column < columns; column += stride) {
      body(row, column);
    }
  }
}

// What the operators need of CUDA. Tests have one that runs on the host.
template <typename T>
concept PointwiseDevice =
    requires(typename T::Stream stream, void (*body)(int64_t, int64_t)) {
      typename T::Guard;    // makes a device the current one
      stream = T::stream(); // the current one
      T::launch(Grid(), stream, /*rows=*/1, /*columns=*/1, body);
    };

// Runs body(row, column) for all, on the current stream.
template <PointwiseDevice Device, typename Body>
void launch_pointwise(int64_t rows, int64_t columns, const Body& body) {
  if (rows > 0 && columns > 0) {
    Device::launch(
        grid_for(rows, columns), Device::stream(), rows, columns, body);
  }
}

} // namespace lltm
