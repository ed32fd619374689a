#include "ops/lltm.h"
#include "ops/lltm_autocast.h"
#include "ops/lltm_checks.h"
#include "ops/lltm_composite.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <initializer_list>

// vmap. A mapped dimension of input and state is more rows of the batch. Where
// the weights or their gradients are mapped, the composite formulas become
// batched GEMMs.
namespace lltm {

namespace {

using Tensors = std::initializer_list<std::reference_wrapper<const at::Tensor>>;

// The innermost level of vmap that maps one of args.
int64_t innermost_level(Tensors args) {
  int64_t level = 0;
  for (const at::Tensor& arg : args) {
    if (const auto* mapped = at::functorch::maybeGetBatchedImpl(arg)) {
      level = std::max(level, mapped->level());
    }
  }
  return level;
}

const at::functorch::BatchedTensorImpl* mapped_at_level(
    const at::Tensor& tensor,
    int64_t level) {
  const auto* mapped = at::functorch::maybeGetBatchedImpl(tensor);
  return mapped != nullptr && mapped->level() == level ? mapped : nullptr;
}

// Folds tensors [batch, columns] that vmap maps at a level into plain ones
// [mapped * batch, columns], and results back.
class MappedRows {
 public:
  MappedRows(Tensors args, int64_t level)
      : level_(level), batch_(args.begin()->get().sym_size(0)) {
    for (const at::Tensor& arg : args) {
      if (const auto* mapped = mapped_at_level(arg, level_)) {
        mapped_ = mapped->value().sym_size(mapped->bdim());
      }
    }
  }

  at::Tensor fold(const at::Tensor& arg) const {
    const auto columns = arg.sym_size(1);
    const auto* mapped = mapped_at_level(arg, level_);
    const auto outermost = mapped != nullptr
        ? mapped->value().movedim(mapped->bdim(), 0)
        : arg.unsqueeze(0).expand_symint({mapped_, batch_, columns});
    return outermost.reshape_symint({mapped_ * batch_, columns});
  }

  at::Tensor unfold(const at::Tensor& tensor) const {
    if (!tensor.defined()) {
      return tensor;
    }
    return at::functorch::makeBatched(
        tensor.view_symint({mapped_, batch_, tensor.sym_size(1)}), 0, level_);
  }

 private:
  int64_t level_;
  c10::SymInt batch_;
  c10::SymInt mapped_;
};

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
  const MappedRows rows({input, old_h, old_cell}, level);
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
  const MappedRows rows(
      {grad_h, grad_cell, new_cell, gates, input, old_h}, level);
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
