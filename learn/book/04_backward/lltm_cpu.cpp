#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <torch/library.h>

#include "lltm.h"

namespace {

lltm::StateAndGates forward_with_gates_kernel(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  lltm::log_call("CPU", "forward");
  lltm::check_forward(input, weights, bias, old_h, old_cell);
  auto pre_activations = at::linear(at::cat({old_h, input}, 1), weights, bias).chunk(3, 1);
  auto i = at::sigmoid(pre_activations[0]);
  auto o = at::sigmoid(pre_activations[1]);
  auto g = at::elu(pre_activations[2]);
  // Contiguous, whatever the strides of old_cell: chapter 5 needs to know the strides of a result.
  auto new_cell = (old_cell + g * i).contiguous();
  return {at::tanh(new_cell) * o, new_cell, at::cat({i, o, g}, 1)};
}

lltm::State forward_kernel(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto [new_h, new_cell, gates] = forward_with_gates_kernel(input, weights, bias, old_h, old_cell);
  return {new_h, new_cell};
}

lltm::Gradients backward_kernel(
    const at::Tensor& grad_h, const at::Tensor& grad_cell, const at::Tensor& new_cell,
    const at::Tensor& gates, const at::Tensor& input, const at::Tensor& weights,
    const at::Tensor& old_h) {
  lltm::log_call("CPU", "backward");
  lltm::check_backward(grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  auto chunks = gates.chunk(3, 1);
  auto i = chunks[0], o = chunks[1], g = chunks[2];
  auto t = at::tanh(new_cell);
  auto d_old_cell = (grad_cell + grad_h * o * (1 - t * t)).contiguous();
  auto d_i = d_old_cell * g * i * (1 - i);
  auto d_o = grad_h * t * o * (1 - o);
  // elu(x) = exp(x) - 1 below 0, so its derivative there is elu(x) + 1.
  auto d_g = d_old_cell * i * at::where(g > 0, at::ones_like(g), g + 1);
  auto d_gates = at::cat({d_i, d_o, d_g}, 1);

  auto state_size = old_h.size(1);
  // Two products, not two slices of one: the results of an operator share no memory.
  auto d_old_h = at::mm(d_gates, weights.narrow(1, 0, state_size));
  auto d_input = at::mm(d_gates, weights.narrow(1, state_size, input.size(1)));
  auto d_weights = at::mm(d_gates.t(), at::cat({old_h, input}, 1));
  return {d_input, d_weights, d_gates.sum(0), d_old_h, d_old_cell};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("forward", forward_kernel);
  m.impl("_forward_with_gates", forward_with_gates_kernel);
  m.impl("backward", backward_kernel);
}
