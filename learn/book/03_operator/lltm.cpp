#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <torch/library.h>

namespace {

std::tuple<at::Tensor, at::Tensor> forward_kernel(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto features = old_h.size(1) + input.size(1);
  TORCH_CHECK(
      weights.size(1) == features, "lltm::forward: expected weights to have ", features,
      " columns, but got ", weights.size(1));
  auto pre_activations = at::linear(at::cat({old_h, input}, 1), weights, bias);
  auto gates = pre_activations.chunk(3, 1);
  auto new_cell = old_cell + at::elu(gates[2]) * at::sigmoid(gates[0]);
  auto new_h = at::tanh(new_cell) * at::sigmoid(gates[1]);
  return {new_h, new_cell};
}

} // namespace

TORCH_LIBRARY(lltm, m) {
  m.def(
      "forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell)"
      " -> (Tensor new_h, Tensor new_cell)");
}

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("forward", forward_kernel);
}
