#include "ops/lltm_autocast.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"
#include "ops/lltm_sequence_composite.h"
#include "ops/vmap_levels.h"

#include <torch/library.h>

// Does what lltm_vmap.cpp does for the cell. Packed sequences take the
// composite formulas: their batch is no dimension.
namespace lltm {

namespace {

void check_not_mapped(const char* op, const OptionalTensor& batch_sizes) {
  TORCH_CHECK(
      !batch_sizes ||
          at::functorch::maybeGetBatchedImpl(*batch_sizes) == nullptr,
      op,
      ": expected batch_sizes to be the same for all that vmap maps, ",
      "but got one that is mapped");
}

template <
    typename Result,
    SequenceForwardOp<Result> op,
    SequenceForwardOp<Result> composite_op>
Result sequence_forward_vmap(
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
  check_not_mapped(kSequenceForward, batch_sizes);
  if (autocast_applies(input)) {
    return call_in_lower_precision(
        [&](const auto&... tensors) {
          return sequence_forward_vmap<Result, op, composite_op>(
              tensors..., batch_sizes, reverse, resets);
        },
        input,
        weights,
        bias,
        h0,
        c0);
  }
  check_sequence_forward(input, weights, bias, h0, c0, batch_sizes, resets);
  const auto resets_or_none = resets.value_or(at::Tensor());
  const auto level =
      innermost_level({input, weights, bias, h0, c0, resets_or_none});
  if (batch_sizes || mapped_at_level(weights, level) ||
      mapped_at_level(bias, level)) {
    return composite_op(
        input, weights, bias, h0, c0, batch_sizes, reverse, resets);
  }
  const MappedBatch batch(
      {input, h0, c0, resets_or_none}, h0.sym_size(0), level);
  c10::impl::ExcludeDispatchKeyGuard below_vmap(
      c10::DispatchKey::FuncTorchBatched);
  const auto results =
      op(batch.fold(input, 1),
         weights,
         bias,
         batch.fold(h0),
         batch.fold(c0),
         batch_sizes,
         reverse,
         resets ? OptionalTensor(batch.fold(*resets, 1)) : resets);
  return std::apply(
      [&](const auto&... tensors) {
        return Result(batch.unfold(tensors, 1)...);
      },
      results);
}

BackwardResult sequence_backward_vmap(
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
  check_not_mapped(kSequenceBackward, batch_sizes);
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
  const auto resets_or_none = resets.value_or(at::Tensor());
  const auto level = innermost_level(
      {grad_output,
       grad_cells,
       output,
       cells,
       gates,
       input,
       weights,
       h0,
       resets_or_none});
  if (batch_sizes || mapped_at_level(weights, level) || output_mask[1] ||
      output_mask[2]) {
    return composite::sequence_backward(
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
  const MappedBatch batch(
      {grad_output,
       grad_cells,
       output,
       cells,
       gates,
       input,
       h0,
       resets_or_none},
      h0.sym_size(0),
      level);
  c10::impl::ExcludeDispatchKeyGuard below_vmap(
      c10::DispatchKey::FuncTorchBatched);
  const auto [d_input, d_weights, d_bias, d_h0, d_c0] = sequence_backward(
      batch.fold(grad_output, 1),
      batch.fold(grad_cells, 1),
      batch.fold(output, 1),
      batch.fold(cells, 1),
      batch.fold(gates, 1),
      batch.fold(input, 1),
      weights,
      batch.fold(h0),
      batch_sizes,
      reverse,
      resets ? OptionalTensor(batch.fold(*resets, 1)) : resets,
      output_mask);
  return {
      batch.unfold(d_input, 1),
      d_weights,
      d_bias,
      batch.unfold(d_h0),
      batch.unfold(d_c0)};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl(
      "sequence_forward",
      TORCH_FN((sequence_forward_vmap<
                ForwardResult,
                sequence_forward,
                composite::sequence_forward>)));
  m.impl(
      "_sequence_forward_with_gates",
      TORCH_FN((sequence_forward_vmap<
                ForwardWithGatesResult,
                _sequence_forward_with_gates,
                composite::sequence_forward_with_gates>)));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_vmap));
}

} // namespace lltm
