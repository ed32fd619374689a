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
#include <ATen/ops/where.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace lltm {

namespace {

// narrow(), because the derivative of a split makes zeros of its own for a part
// without a gradient: plain tensors, which no DTensor goes with.
at::Tensor columns_for_h(const at::Tensor& weights, const at::Tensor& old_h) {
  return weights.narrow_symint(1, 0, old_h.sym_size(1));
}

at::Tensor columns_for_input(
    const at::Tensor& weights,
    const at::Tensor& input,
    const at::Tensor& old_h) {
  return weights.narrow_symint(1, old_h.sym_size(1), input.sym_size(1));
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

at::Tensor to_opmath(const at::Tensor& tensor) {
  return tensor.to(at::toOpMathType(tensor.scalar_type()));
}

ForwardWithGatesResult composite_step(const ForwardArguments& a) {
  warn_without_cuda_kernels(a.input);
  const auto dtype = a.input.scalar_type();
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
  const auto input_gate = at::sigmoid(sums[0]);
  const auto output_gate = at::sigmoid(sums[1]);
  const auto candidate = at::elu(sums[2]);
  // contiguous(): elementwise results take over the strides of the arguments.
  auto new_cell = (old_cell + candidate * input_gate).contiguous();
  auto new_h = (at::tanh(new_cell) * output_gate).to(dtype).contiguous();
  auto gates = at::cat({input_gate, output_gate, candidate}, 1).to(dtype);
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

std::pair<at::Tensor, at::Tensor> composite_gate_gradients(
    const BackwardArguments& a,
    const at::Tensor& grad_gates) {
  warn_without_cuda_kernels(a.gates);
  const auto chunks = to_opmath(a.gates).chunk(3, 1);
  const auto& input_gate = chunks[0];
  const auto& output_gate = chunks[1];
  const auto& candidate = chunks[2];
  const auto t = at::tanh(to_opmath(a.new_cell));
  auto d_cell =
      (a.grad_cell + a.grad_h * output_gate * (1 - t * t)).contiguous();
  const auto d_activated =
      at::cat({d_cell * candidate, a.grad_h * t, d_cell * input_gate}, 1);
  const auto slopes = at::cat(
      {input_gate * (1 - input_gate),
       output_gate * (1 - output_gate),
       at::where(candidate >= 0, 1, candidate + 1)},
      1);
  auto d_gates =
      slopes * (grad_gates.defined() ? d_activated + grad_gates : d_activated);
  return {std::move(d_gates), std::move(d_cell)};
}

ForwardWithGatesResult composite_forward(const ForwardArguments& a) {
  auto [new_h, new_cell, gates] = composite_step(a);
  return {
      std::move(new_h),
      new_cell.to(a.old_cell.scalar_type()),
      std::move(gates)};
}

BackwardResult composite_backward(
    const BackwardArguments& a,
    const at::Tensor& grad_gates) {
  const auto [d_gates, d_cell] = composite_gate_gradients(a, grad_gates);
  return pre_activations_backward(
      d_gates, d_cell, a.input, a.weights, a.old_h, a.output_mask);
}

// Any device without kernels in a folder of its own.
TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  m.impl("forward", as_kernel<composite_kernel<forward>>());
  m.impl(
      "_forward_with_gates",
      as_kernel<composite_kernel<_forward_with_gates>>());
  m.impl("backward", as_kernel<composite_kernel<backward>>());
}

} // namespace lltm
