#pragma once

#include <cstdint>

namespace lltm {

struct CellSizes {
  int64_t batch;
  int64_t input_features;
  int64_t state_size;

  // Columns of weights.
  int64_t features() const {
    return state_size + input_features;
  }
};

} // namespace lltm
