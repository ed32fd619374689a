#include "ops/lltm_autocast.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"

#include <torch/library.h>

// Does what lltm_autocast.cpp does for the cell.
namespace lltm {

namespace {

template <typename Result, SequenceForwardOp<Result> op>
Result sequence_forward_autocast(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets) {
  check_sequence_forward_devices(
      input, weights, bias, h0, c0, batch_sizes, resets);
  return call_in_lower_precision(
      [&](const auto&... tensors) {
        return op(tensors..., batch_sizes, reverse, resets);
      },
      input,
      weights,
      bias,
      h0,
      c0);
}

void implement(torch::Library& m) {
  m.impl(
      "sequence_forward",
      TORCH_FN((sequence_forward_autocast<ForwardResult, sequence_forward>)));
  m.impl(
      "_sequence_forward_with_gates",
      TORCH_FN((sequence_forward_autocast<
                ForwardWithGatesResult,
                _sequence_forward_with_gates>)));
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  implement(m);
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  implement(m);
}

} // namespace lltm
