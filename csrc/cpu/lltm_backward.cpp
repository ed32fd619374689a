#include "cpu/lltm_backward.h"

#include "cpu/lltm_backward_pointwise.h"
#include "cpu/lltm_gradients.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/profiled_path.h"
#include "cpu/primitives/scratch.h"

#include <ATen/OpMathType.h>

namespace lltm {

namespace {

template <typename scalar_t, typename gemm_t>
void backward_gemm(const BackwardPointers<scalar_t>& a) {
  GateGradients<gemm_t> d_gates{a.batch, 3 * a.state_size};
  const bool wants_rows = a.d_input != nullptr || a.d_old_h != nullptr;
  const bool wants_columns = a.d_weights != nullptr || a.d_bias != nullptr;
  const Scratch<gemm_t> rows(wants_rows ? a.batch * d_gates.ld_rows : 0);
  const Scratch<gemm_t> columns(
      wants_columns ? d_gates.units * d_gates.ld_columns : 0);
  d_gates.rows = rows.data();
  d_gates.columns = columns.data();
  d_gates.zero_padding();
  backward_pointwise(a, d_gates);
  if (a.d_bias != nullptr) {
    bias_gradient(d_gates, a.d_bias, false);
  }
  if (a.d_weights != nullptr) {
    weights_gradient(a, d_gates, a.old_h, a.input, a.d_weights, false);
  }
  if (a.d_old_h != nullptr) {
    rows_gradient(a, d_gates, a.weights, a.state_size, a.d_old_h);
  }
  if (a.d_input != nullptr) {
    const auto* weights = a.weights + a.state_size;
    rows_gradient(a, d_gates, weights, a.input_features, a.d_input);
  }
}

} // namespace

template <typename scalar_t>
void backward_step(const BackwardPointers<scalar_t>& pointers) {
  if constexpr (kPair<scalar_t> == 2) {
    if (has_bfloat16_gemm()) {
      const ProfiledPath path("lltm::backward_gemm_bfloat16");
      return backward_gemm<scalar_t, scalar_t>(pointers);
    }
  }
  const ProfiledPath path("lltm::backward_gemm");
  backward_gemm<scalar_t, at::opmath_type<scalar_t>>(pointers);
}

template void backward_step(const BackwardPointers<double>&);
template void backward_step(const BackwardPointers<float>&);
template void backward_step(const BackwardPointers<c10::Half>&);
template void backward_step(const BackwardPointers<c10::BFloat16>&);

} // namespace lltm
