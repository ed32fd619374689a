#include "ops/lltm_sequence.h"

#include <torch/library.h>

namespace lltm {

ForwardResult sequence_forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::sequence_forward", "")
                             .typed<decltype(sequence_forward)>();
  return op.call(input, weights, bias, h0, c0, batch_sizes, reverse, resets);
}

ForwardWithGatesResult _sequence_forward_with_gates(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("lltm::_sequence_forward_with_gates", "")
          .typed<decltype(_sequence_forward_with_gates)>();
  return op.call(input, weights, bias, h0, c0, batch_sizes, reverse, resets);
}

BackwardResult sequence_backward(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets,
    OutputMask output_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("lltm::sequence_backward", "")
                             .typed<decltype(sequence_backward)>();
  return op.call(
      grad_output,
      grad_cells,
      output,
      cells,
      gates,
      input,
      weights,
      h0,
      batch_sizes,
      reverse,
      resets,
      output_mask);
}

// The tags as in lltm.cpp.
TORCH_LIBRARY_FRAGMENT(lltm, m) {
  const std::vector<at::Tag> tags{
      at::Tag::pt2_compliant_tag, at::Tag::flexible_layout};
  m.def(
      "sequence_forward(Tensor input, Tensor weights, Tensor bias, Tensor h0, "
      "Tensor c0, Tensor? batch_sizes=None, bool reverse=False, "
      "Tensor? resets=None) -> (Tensor output, Tensor cells)",
      tags);
  m.def(
      "_sequence_forward_with_gates(Tensor input, Tensor weights, Tensor bias, "
      "Tensor h0, Tensor c0, Tensor? batch_sizes=None, bool reverse=False, "
      "Tensor? resets=None) -> (Tensor output, Tensor cells, Tensor gates)",
      tags);
  m.def(
      "sequence_backward(Tensor grad_output, Tensor grad_cells, Tensor output, "
      "Tensor cells, Tensor gates, Tensor input, Tensor weights, Tensor h0, "
      "Tensor? batch_sizes=None, bool reverse=False, Tensor? resets=None, "
      "bool[5] output_mask=[True, True, True, True, True]) "
      "-> (Tensor d_input, Tensor d_weights, Tensor d_bias, Tensor d_h0, "
      "Tensor d_c0)",
      tags);
}

} // namespace lltm
