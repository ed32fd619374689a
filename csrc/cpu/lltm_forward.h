#pragma once

#include "cpu/lltm_forward_pointwise.h"

namespace lltm {

// One step forward, on the path that is fastest for its sizes.
template <typename scalar_t>
void forward_step(const ForwardPointers<scalar_t>& arguments);

} // namespace lltm
