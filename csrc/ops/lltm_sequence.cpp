#include "ops/lltm_sequence.h"

#include "ops/dispatch.h"

#include <torch/library.h>

#include <vector>

namespace lltm {

ForwardResult sequence_forward(const SequenceForwardArguments& arguments) {
  return call<sequence_forward>("lltm::sequence_forward", arguments);
}

ForwardWithGatesResult _sequence_forward_with_gates(
    const SequenceForwardArguments& arguments) {
  return call<_sequence_forward_with_gates>(
      "lltm::_sequence_forward_with_gates", arguments);
}

BackwardResult sequence_backward(const SequenceBackwardArguments& arguments) {
  return call<sequence_backward>("lltm::sequence_backward", arguments);
}

// The tags, and where the kernels are, as in lltm.cpp.
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
      "sequence_backward(Tensor grad_output, Tensor? grad_cells, Tensor output,"
      " Tensor cells, Tensor gates, Tensor input, Tensor weights, Tensor h0, "
      "Tensor? batch_sizes=None, bool reverse=False, Tensor? resets=None, "
      "bool[5] output_mask=[True, True, True, True, True]) "
      "-> (Tensor d_input, Tensor d_weights, Tensor d_bias, Tensor d_h0, "
      "Tensor d_c0)",
      tags);
  // Internal. Values are read by an operator so that tracers see it: they
  // refuse that, unless batch_sizes are a constant of their graph. The message
  // says for what purpose the caller reads them.
  m.def(
      "_values_of_batch_sizes(Tensor batch_sizes, str caller, str purpose) "
      "-> int[]",
      {at::Tag::pt2_compliant_tag, at::Tag::data_dependent_output});
}

} // namespace lltm
