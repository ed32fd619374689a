#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

#include <torch/library.h>

#include <utility>

// Meta: shapes only. Outputs are contiguous whatever the strides of the
// arguments, as the kernels make them. They do not depend on the values of
// batch_sizes, which a fake tensor does not have.
namespace lltm {

namespace {

at::Tensor empty_like_contiguous(const at::Tensor& tensor) {
  return tensor.new_empty_symint(tensor.sym_sizes());
}

// old_h and old_cell lend the sizes of their gradients.
template <typename Arguments>
BackwardResult empty_gradients(
    const Arguments& a,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  const auto if_asked = [&](size_t i, const at::Tensor& like) {
    return a.output_mask[i] ? empty_like_contiguous(like) : at::Tensor();
  };
  return {
      if_asked(0, a.input),
      if_asked(1, a.weights),
      a.output_mask[2] ? a.weights.new_empty_symint({a.weights.sym_size(0)})
                       : at::Tensor(),
      if_asked(3, old_h),
      if_asked(4, old_cell)};
}

ForwardResult forward_meta(const ForwardArguments& a) {
  check_arguments(a);
  return {empty_like_contiguous(a.old_h), empty_like_contiguous(a.old_cell)};
}

ForwardWithGatesResult forward_with_gates_meta(const ForwardArguments& a) {
  auto [new_h, new_cell] = forward_meta(a);
  return {
      std::move(new_h),
      std::move(new_cell),
      a.input.new_empty_symint({a.input.sym_size(0), a.weights.sym_size(0)})};
}

BackwardResult backward_meta(const BackwardArguments& a) {
  check_arguments(a);
  return empty_gradients(a, a.old_h, a.new_cell);
}

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
  return empty_gradients(a, a.h0, a.h0);
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("forward", as_kernel<forward_meta>());
  m.impl("_forward_with_gates", as_kernel<forward_with_gates_meta>());
  m.impl("backward", as_kernel<backward_meta>());
  m.impl("sequence_forward", as_kernel<sequence_forward_meta>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<sequence_forward_with_gates_meta>());
  m.impl("sequence_backward", as_kernel<sequence_backward_meta>());
}

} // namespace lltm
