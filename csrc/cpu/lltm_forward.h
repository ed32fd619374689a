#pragma once

#include "cpu/gemm.h"
#include "cpu/lltm_forward_dot.h"
#include "cpu/lltm_forward_gemm.h"

#include <ATen/OpMathType.h>

namespace lltm {

// One step forward, on the path that is fastest for its sizes.
template <typename scalar_t>
void forward_step(const ForwardArguments<scalar_t>& arguments) {
  if (is_dot_faster(arguments)) {
    return ForwardDot<scalar_t>(arguments).run();
  }
  if constexpr (kPair<scalar_t> == 2) {
    const bool whole_pairs =
        arguments.state_size % 2 == 0 && arguments.input_features % 2 == 0;
    if (whole_pairs && has_bfloat16_gemm()) {
      return ForwardGemm<scalar_t, scalar_t>(arguments).run();
    }
  }
  ForwardGemm<scalar_t, at::opmath_type<scalar_t>>(arguments).run();
}

} // namespace lltm
