#include "ops/lltm_composite.h"

#include "ops/dispatch.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace lltm {

namespace {

at::Tensor columns_for_h(const at::Tensor& weights, const at::Tensor& old_h) {
  return weights.narrow(1, 0, old_h.size(1));
}

at::Tensor columns_for_input(
    const at::Tensor& weights,
    const at::Tensor& input,
    const at::Tensor& old_h) {
  return weights.narrow(1, old_h.size(1), input.size(1));
}

// The composite formulas are right on a GPU too, but slow, so nobody who has a
// GPU means to use them.
void warn_without_cuda_kernels([[maybe_unused]] const at::Tensor& tensor) {
#ifndef LLTM_CUDA_VERSION
  if (tensor.is_cuda()) {
    TORCH_WARN_ONCE(
        "lltm: expected a library with CUDA kernels, but this one was built "
        "without, so calls on a GPU are slow; build it again with CUDA_HOME "
        "set");
  }
#endif
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
    const at::Tensor& d_preactivations,
    const at::Tensor& d_old_cell,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h,
    OutputMask output_mask) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto& [d_input, d_weights, d_bias, d_old_h, d_cell] = output_mask;
  const at::Tensor none;
  return {
      d_input ? d_preactivations.mm(columns_for_input(weights, input, old_h))
              : none,
      d_weights ? d_preactivations.t().mm(at::cat({old_h, input}, 1)) : none,
      d_bias ? d_preactivations.sum(0) : none,
      d_old_h ? d_preactivations.mm(columns_for_h(weights, old_h)) : none,
      d_cell ? d_old_cell : none};
}

at::Tensor to_opmath(const at::Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

ForwardResult composite_step(const ForwardArguments& a) {
  warn_without_cuda_kernels(a.input);
  // In opmath: products that are rounded before they are activated would cost
  // half types much of their accuracy.
  const auto features = to_opmath(at::cat({a.old_h, a.input}, 1));
  const auto weights = to_opmath(a.weights);
  const auto bias = to_opmath(a.bias);
  const auto old_cell = to_opmath(a.old_cell);
  // A device may have autocast where we have no autocast kernel for it.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto sums = at::linear(features, weights, bias).chunk(3, 1);
  const auto candidate = at::elu(sums[2]);
  // contiguous(): elementwise results take over the strides of the arguments.
  auto new_cell = (old_cell + candidate * at::sigmoid(sums[0])).contiguous();
  auto new_h = at::tanh(new_cell) * at::sigmoid(sums[1]);
  return {new_h.to(a.input.scalar_type()).contiguous(), std::move(new_cell)};
}

ForwardResult composite_forward(const ForwardArguments& a) {
  auto [new_h, new_cell] = composite_step(a);
  return {std::move(new_h), new_cell.to(a.old_cell.scalar_type())};
}

// Any device without kernels in a folder of its own. Autograd differentiates
// these formulas themselves there.
TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  m.impl("forward", as_kernel<composite_kernel<forward>>());
}

} // namespace lltm
