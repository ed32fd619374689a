#include "cpu/lltm_backward.h"

#include "cpu/lltm_backward_gemm.h"
#include "cpu/lltm_backward_pointwise.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/profiled_path.h"
#include "cpu/primitives/scratch.h"

#include <ATen/OpMathType.h>

namespace lltm {

namespace {

template <typename scalar_t, typename gemm_t>
void backward_gemm(const BackwardPointers<scalar_t>& a) {
  const auto rows = 3 * a.state_size;
  const bool wants_rows = a.d_input != nullptr || a.d_old_h != nullptr;
  const bool wants_columns = a.d_weights != nullptr || a.d_bias != nullptr;
  const auto ld_rows = padded_terms<gemm_t>(rows);
  const auto batch = padded_batch<gemm_t>(a.batch);
  const Scratch<gemm_t> row_scratch(wants_rows ? a.batch * ld_rows : 0);
  const Scratch<gemm_t> column_scratch(wants_columns ? rows * batch : 0);
  const GateGradients<gemm_t> d_gates{
      wants_rows ? row_scratch.data() : nullptr,
      ld_rows,
      wants_columns ? column_scratch.data() : nullptr,
      rows,
      batch};
  d_gates.zero_padding(a.batch);
  backward_pointwise(a, d_gates);
  if (a.d_bias != nullptr) {
    sum_columns(d_gates, a.batch, a.d_bias, false);
  }
  if (a.d_weights != nullptr) {
    BackwardWeights<scalar_t, gemm_t, scalar_t>(
        a, d_gates, a.old_h, a.input, a.d_weights, false)
        .run();
  }
  if (a.d_old_h != nullptr) {
    BackwardColumns<scalar_t, gemm_t>(
        a, d_gates, a.weights, 0, a.state_size, a.d_old_h)
        .run();
  }
  if (a.d_input != nullptr) {
    BackwardColumns<scalar_t, gemm_t>(
        a, d_gates, a.weights, a.state_size, a.input_features, a.d_input)
        .run();
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
