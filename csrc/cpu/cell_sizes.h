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

  // Whether rows of weights divide into the pairs that bfloat16 multiplies.
  bool has_whole_pairs() const {
    return state_size % 2 == 0 && input_features % 2 == 0;
  }
};

} // namespace lltm
