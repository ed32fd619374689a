#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_sequence.h"

#include <torch/library.h>

#include <tuple>

// Meta: shapes only. Outputs are contiguous whatever the strides of the
// arguments, as the kernels make them. They do not depend on the values of
// batch_sizes, which a fake tensor does not have.
namespace lltm {

namespace {

template <typename Arguments>
ForwardWithGatesResult forward_with_gates_meta(const Arguments& a) {
  const auto sizes = check_arguments(a);
  return std::apply(
      [&](const auto&... shapes) {
        return ForwardWithGatesResult{
            a.input.new_empty_symint(sizes.of(shapes))...};
      },
      a.results());
}

template <typename Arguments>
ForwardResult forward_meta(const Arguments& arguments) {
  return without_gates(forward_with_gates_meta(arguments));
}

template <typename Arguments>
BackwardResult backward_meta(const Arguments& a) {
  const auto sizes = check_arguments(a);
  auto asked = a.output_mask.begin();
  const auto empty_if_asked = [&](const Shape& shape) {
    return *asked++ ? a.input.new_empty_symint(sizes.of(shape)) : at::Tensor();
  };
  return std::apply(
      [&](const auto&... shapes) {
        return BackwardResult{empty_if_asked(shapes)...};
      },
      a.results());
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
