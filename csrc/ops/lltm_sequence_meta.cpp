#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"
#include "ops/lltm_sequence_steps.h"

#include <torch/library.h>

// Meta: shapes only. They do not depend on the values of batch_sizes, which a
// fake tensor does not have.
namespace lltm {

namespace {

ForwardResult sequence_forward_meta(const SequenceForwardArguments& a) {
  check_arguments(a);
  const auto state_size = a.h0.sym_size(1);
  return {empty_rows(a.input, state_size), empty_rows(a.input, state_size)};
}

ForwardWithGatesResult sequence_forward_with_gates_meta(
    const SequenceForwardArguments& a) {
  auto [output, cells] = sequence_forward_meta(a);
  return {
      std::move(output),
      std::move(cells),
      empty_rows(a.input, a.weights.sym_size(0))};
}

BackwardResult sequence_backward_meta(const SequenceBackwardArguments& a) {
  check_arguments(a);
  const auto if_asked = [&](size_t i, const at::Tensor& like) {
    return a.output_mask[i] ? like.new_empty_symint(like.sym_sizes())
                            : at::Tensor();
  };
  return {
      if_asked(0, a.input),
      if_asked(1, a.weights),
      a.output_mask[2] ? a.weights.new_empty_symint({a.weights.sym_size(0)})
                       : at::Tensor(),
      if_asked(3, a.h0),
      if_asked(4, a.h0)};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("sequence_forward", as_kernel<sequence_forward_meta>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<sequence_forward_with_gates_meta>());
  m.impl("sequence_backward", as_kernel<sequence_backward_meta>());
}

} // namespace lltm
