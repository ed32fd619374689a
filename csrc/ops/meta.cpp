#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_sequence.h"

#include <torch/library.h>

// Meta: shapes only. Outputs are contiguous whatever the strides of the
// arguments, as the kernels make them. They do not depend on the values of
// batch_sizes, which a fake tensor does not have.
namespace lltm {

namespace {

template <typename Arguments>
ForwardWithGatesResult forward_with_gates_meta(const Arguments& a) {
  const auto sizes = check_arguments(a);
  const auto empty_rows = [&](Dim columns) {
    return a.input.new_empty_symint(sizes.of(a.rows(columns)));
  };
  return {
      empty_rows(Dim::kStateSize),
      empty_rows(Dim::kStateSize),
      empty_rows(Dim::kGates)};
}

template <typename Arguments>
ForwardResult forward_meta(const Arguments& arguments) {
  return without_gates(forward_with_gates_meta(arguments));
}

template <typename Arguments>
BackwardResult backward_meta(const Arguments& a) {
  const auto sizes = check_arguments(a);
  const auto empty_if_asked = [&](size_t i, const Shape& shape) {
    return a.output_mask[i] ? a.input.new_empty_symint(sizes.of(shape))
                            : at::Tensor();
  };
  constexpr Shape state{Dim::kBatch, Dim::kStateSize};
  return {
      empty_if_asked(0, a.rows(Dim::kInputFeatures)),
      empty_if_asked(1, {Dim::kGates, Dim::kFeatures}),
      empty_if_asked(2, {Dim::kGates}),
      empty_if_asked(3, state),
      empty_if_asked(4, state)};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("forward", as_kernel<forward_meta<ForwardArguments>>());
  m.impl(
      "_forward_with_gates",
      as_kernel<forward_with_gates_meta<ForwardArguments>>());
  m.impl("backward", as_kernel<backward_meta<BackwardArguments>>());
  m.impl(
      "sequence_forward", as_kernel<forward_meta<SequenceForwardArguments>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<forward_with_gates_meta<SequenceForwardArguments>>());
  m.impl(
      "sequence_backward",
      as_kernel<backward_meta<SequenceBackwardArguments>>());
}

} // namespace lltm
