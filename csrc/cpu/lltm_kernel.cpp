#include "cpu/empty_gradients.h"
#include "cpu/lltm_backward.h"
#include "cpu/lltm_forward.h"
#include "ops/lltm.h"
#include "ops/lltm_checks.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace lltm {

namespace {

template <bool write_gates>
ForwardWithGatesResult forward_kernel_impl(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward(input, weights, bias, old_h, old_cell);
  const auto batch = input.size(0);
  const auto state_size = old_h.size(1);
  auto new_h = at::empty({batch, state_size}, input.options());
  auto new_cell = at::empty({batch, state_size}, input.options());
  at::Tensor gates;
  if constexpr (write_gates) {
    gates = at::empty({batch, 3 * state_size}, input.options());
  }
  if (batch == 0 || state_size == 0) {
    return {std::move(new_h), std::move(new_cell), std::move(gates)};
  }
  const auto input_ = input.expect_contiguous();
  const auto weights_ = weights.expect_contiguous();
  const auto bias_ = bias.expect_contiguous();
  const auto old_h_ = old_h.expect_contiguous();
  const auto old_cell_ = old_cell.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "lltm_forward_cpu", [&] {
        forward_step<scalar_t>({
            {batch, input.size(1), state_size},
            input_->const_data_ptr<scalar_t>(),
            weights_->const_data_ptr<scalar_t>(),
            bias_->const_data_ptr<scalar_t>(),
            old_h_->const_data_ptr<scalar_t>(),
            old_cell_->const_data_ptr<scalar_t>(),
            new_h.mutable_data_ptr<scalar_t>(),
            new_cell.mutable_data_ptr<scalar_t>(),
            write_gates ? gates.mutable_data_ptr<scalar_t>() : nullptr,
            /*unrounded_old_cell=*/nullptr,
            /*unrounded_new_cell=*/nullptr,
        });
      });
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

ForwardResult forward_kernel(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  auto [new_h, new_cell, gates] =
      forward_kernel_impl<false>(input, weights, bias, old_h, old_cell);
  return {std::move(new_h), std::move(new_cell)};
}

BackwardResult backward_kernel(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  auto result = empty_gradients(new_cell, input, weights, old_h, output_mask);
  if (new_cell.numel() == 0) {
    return result;
  }
  const auto batch = input.size(0);
  const auto state_size = old_h.size(1);
  auto& [d_input, d_weights, d_bias, d_old_h, d_old_cell] = result;
  const auto grad_h_ = grad_h.expect_contiguous();
  const auto grad_cell_ = grad_cell.expect_contiguous();
  const auto new_cell_ = new_cell.expect_contiguous();
  const auto gates_ = gates.expect_contiguous();
  const auto input_ = input.expect_contiguous();
  const auto weights_ = weights.expect_contiguous();
  const auto old_h_ = old_h.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, input.scalar_type(), "lltm_backward_cpu", [&] {
        backward_step<scalar_t>({
            {batch, input.size(1), state_size},
            grad_h_->const_data_ptr<scalar_t>(),
            grad_cell_->const_data_ptr<scalar_t>(),
            new_cell_->const_data_ptr<scalar_t>(),
            gates_->const_data_ptr<scalar_t>(),
            input_->const_data_ptr<scalar_t>(),
            weights_->const_data_ptr<scalar_t>(),
            old_h_->const_data_ptr<scalar_t>(),
            pointer_or_null<scalar_t>(d_input),
            pointer_or_null<scalar_t>(d_weights),
            pointer_or_null<scalar_t>(d_bias),
            pointer_or_null<scalar_t>(d_old_h),
            pointer_or_null<scalar_t>(d_old_cell),
        });
      });
  return result;
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("forward", TORCH_FN(forward_kernel));
  m.impl("_forward_with_gates", TORCH_FN(forward_kernel_impl<true>));
  m.impl("backward", TORCH_FN(backward_kernel));
}

} // namespace lltm
