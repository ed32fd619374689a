#include "ops/lltm.h"
#include "ops/lltm_autocast.h"
#include "ops/lltm_checks.h"
#include "ops/lltm_composite.h"
#include "ops/vmap_levels.h"

#include <torch/library.h>

// vmap. A mapped dimension of input and state is more rows of the batch. Where
// the weights or their gradients are mapped, the composite formulas become
// batched GEMMs.
namespace lltm {

namespace {

// Function of the five tensors that forward and its twin take.
template <typename Result>
using Forward = Result(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&);

template <typename Result, Forward<Result> op, Forward<Result> composite_op>
Result forward_vmap(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward_devices(input, weights, bias, old_h, old_cell);
  // vmap comes before autocast in the dispatch order, and the formulas below
  // must not be autocast one by one, each by a rule of its own.
  if (autocast_applies(input)) {
    return call_in_lower_precision(
        forward_vmap<Result, op, composite_op>,
        input,
        weights,
        bias,
        old_h,
        old_cell);
  }
  check_forward(input, weights, bias, old_h, old_cell);
  const auto level = innermost_level({input, weights, bias, old_h, old_cell});
  if (mapped_at_level(weights, level) || mapped_at_level(bias, level)) {
    return composite_op(input, weights, bias, old_h, old_cell);
  }
  const MappedBatch rows({input, old_h, old_cell}, input.sym_size(0), level);
  c10::impl::ExcludeDispatchKeyGuard below_vmap(
      c10::DispatchKey::FuncTorchBatched);
  const auto results = op(
      rows.fold(input), weights, bias, rows.fold(old_h), rows.fold(old_cell));
  return std::apply(
      [&](const auto&... tensors) { return Result(rows.unfold(tensors)...); },
      results);
}

BackwardResult backward_vmap(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  const auto level = innermost_level(
      {grad_h, grad_cell, new_cell, gates, input, weights, old_h});
  if (mapped_at_level(weights, level) || output_mask[1] || output_mask[2]) {
    return composite::backward(
        grad_h, grad_cell, new_cell, gates, input, weights, old_h, output_mask);
  }
  const MappedBatch rows(
      {grad_h, grad_cell, new_cell, gates, input, old_h},
      input.sym_size(0),
      level);
  c10::impl::ExcludeDispatchKeyGuard below_vmap(
      c10::DispatchKey::FuncTorchBatched);
  const auto [d_input, d_weights, d_bias, d_old_h, d_old_cell] = backward(
      rows.fold(grad_h),
      rows.fold(grad_cell),
      rows.fold(new_cell),
      rows.fold(gates),
      rows.fold(input),
      weights,
      rows.fold(old_h),
      output_mask);
  return {
      rows.unfold(d_input),
      d_weights,
      d_bias,
      rows.unfold(d_old_h),
      rows.unfold(d_old_cell)};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl(
      "forward",
      TORCH_FN((forward_vmap<ForwardResult, forward, composite::forward>)));
  m.impl(
      "_forward_with_gates",
      TORCH_FN((forward_vmap<
                ForwardWithGatesResult,
                _forward_with_gates,
                composite::forward_with_gates>)));
  m.impl("backward", TORCH_FN(backward_vmap));
}

} // namespace lltm
