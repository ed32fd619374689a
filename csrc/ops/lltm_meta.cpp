#include "ops/lltm.h"
#include "ops/lltm_checks.h"

#include <torch/library.h>

// Meta: shapes only. Outputs are contiguous whatever the strides of the
// arguments, as the kernels make them.
namespace lltm {

namespace {

at::Tensor empty_like_contiguous(const at::Tensor& tensor) {
  return tensor.new_empty_symint(tensor.sym_sizes());
}

ForwardWithGatesResult forward_with_gates_meta(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward(input, weights, bias, old_h, old_cell);
  return {
      empty_like_contiguous(old_h),
      empty_like_contiguous(old_cell),
      input.new_empty_symint({input.sym_size(0), weights.sym_size(0)})};
}

ForwardResult forward_meta(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward(input, weights, bias, old_h, old_cell);
  return {empty_like_contiguous(old_h), empty_like_contiguous(old_cell)};
}

BackwardResult backward_meta(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  const auto if_asked = [&](size_t i, const at::Tensor& like) {
    return output_mask[i] ? empty_like_contiguous(like) : at::Tensor();
  };
  return {
      if_asked(0, input),
      if_asked(1, weights),
      output_mask[2] ? weights.new_empty_symint({weights.sym_size(0)})
                     : at::Tensor(),
      if_asked(3, old_h),
      if_asked(4, new_cell)};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("forward", TORCH_FN(forward_meta));
  m.impl("_forward_with_gates", TORCH_FN(forward_with_gates_meta));
  m.impl("backward", TORCH_FN(backward_meta));
}

} // namespace lltm
