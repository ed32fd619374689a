#include "ops/lltm_linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lltm {

namespace {

at::Tensor columns_for_h(const at::Tensor& weights, const at::Tensor& old_h) {
  return weights.narrow_symint(1, 0, old_h.sym_size(1));
}

at::Tensor columns_for_input(
    const at::Tensor& weights,
    const at::Tensor& input,
    const at::Tensor& old_h) {
  return weights.narrow_symint(1, old_h.sym_size(1), input.sym_size(1));
}

} // namespace

at::Tensor pre_activations(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  auto gates = at::addmm(bias, old_h, columns_for_h(weights, old_h).t());
  return gates.addmm_(input, columns_for_input(weights, input, old_h).t());
}

BackwardResult pre_activations_backward(
    const at::Tensor& d_gates,
    const at::Tensor& d_old_cell,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto as_gates = [&](const at::Tensor& tensor) {
    return tensor.to(d_gates.scalar_type());
  };
  const auto as_input = [&](const at::Tensor& gradient) {
    return gradient.to(input.scalar_type());
  };
  at::Tensor d_input, d_weights, d_bias, d_old_h;
  if (output_mask[0]) {
    const auto columns = columns_for_input(weights, input, old_h);
    d_input = as_input(d_gates.mm(as_gates(columns)));
  }
  if (output_mask[1]) {
    const auto features = at::cat({old_h, input}, 1);
    d_weights = as_input(d_gates.t().mm(as_gates(features)));
  }
  if (output_mask[2]) {
    d_bias = as_input(d_gates.sum(0));
  }
  if (output_mask[3]) {
    const auto columns = columns_for_h(weights, old_h);
    d_old_h = as_input(d_gates.mm(as_gates(columns)));
  }
  return {
      d_input,
      d_weights,
      d_bias,
      d_old_h,
      output_mask[4] ? as_input(d_old_cell) : at::Tensor()};
}

} // namespace lltm
