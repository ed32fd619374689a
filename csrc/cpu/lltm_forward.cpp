#include "cpu/lltm_forward.h"

#include "cpu/choices.h"
#include "cpu/lltm_forward_dot.h"
#include "cpu/lltm_forward_gemm.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/profiled_path.h"

#include <ATen/OpMathType.h>

namespace lltm {

// Paths record their names for the profiler, here and for all other operators.
template <typename scalar_t>
void forward_step(const ForwardPointers<scalar_t>& pointers) {
  if (is_dot_faster(pointers, sizeof(scalar_t))) {
    const ProfiledPath path("lltm::forward_dot");
    return ForwardDot<scalar_t>(pointers).run();
  }
  if constexpr (kPair<scalar_t> == 2) {
    const bool whole_pairs =
        pointers.state_size % 2 == 0 && pointers.input_features % 2 == 0;
    if (whole_pairs && has_bfloat16_gemm()) {
      const ProfiledPath path("lltm::forward_gemm_bfloat16");
      return ForwardGemm<scalar_t, scalar_t>(pointers).run();
    }
  }
  const ProfiledPath path("lltm::forward_gemm");
  ForwardGemm<scalar_t, at::opmath_type<scalar_t>>(pointers).run();
}

template void forward_step(const ForwardPointers<double>&);
template void forward_step(const ForwardPointers<float>&);
template void forward_step(const ForwardPointers<c10::Half>&);
template void forward_step(const ForwardPointers<c10::BFloat16>&);

} // namespace lltm
