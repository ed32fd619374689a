#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"
#include "ops/sequence_steps.h"

#include <torch/library.h>

// Meta: shapes only, whatever batch_sizes are, whose values a fake tensor has
// not.
namespace lltm {

namespace {

ForwardWithGatesResult sequence_forward_with_gates_meta(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool /*reverse*/,
    const OptionalTensor& resets) {
  check_sequence_forward(input, weights, bias, h0, c0, batch_sizes, resets);
  return {
      empty_rows(input, h0.sym_size(1)),
      empty_rows(input, h0.sym_size(1)),
      empty_rows(input, weights.sym_size(0))};
}

ForwardResult sequence_forward_meta(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool /*reverse*/,
    const OptionalTensor& resets) {
  check_sequence_forward(input, weights, bias, h0, c0, batch_sizes, resets);
  return {empty_rows(input, h0.sym_size(1)), empty_rows(input, h0.sym_size(1))};
}

BackwardResult sequence_backward_meta(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool /*reverse*/,
    const OptionalTensor& resets,
    OutputMask output_mask) {
  check_sequence_backward(
      grad_output,
      grad_cells,
      output,
      cells,
      gates,
      input,
      weights,
      h0,
      batch_sizes,
      resets);
  const auto if_asked = [&](size_t i, const at::Tensor& like) {
    return output_mask[i] ? like.new_empty_symint(like.sym_sizes())
                          : at::Tensor();
  };
  return {
      if_asked(0, input),
      if_asked(1, weights),
      output_mask[2] ? weights.new_empty_symint({weights.sym_size(0)})
                     : at::Tensor(),
      if_asked(3, h0),
      if_asked(4, h0)};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("sequence_forward", TORCH_FN(sequence_forward_meta));
  m.impl(
      "_sequence_forward_with_gates",
      TORCH_FN(sequence_forward_with_gates_meta));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_meta));
}

} // namespace lltm
