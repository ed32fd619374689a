// The peer that extension tutorials teach: the cell in C++, out of ATen's
// operators, its backward written by hand. Registered with the dispatcher, so
// that a call costs what ours costs.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct TutorialCell : torch::autograd::Function<TutorialCell> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      const at::Tensor& weights,
      const at::Tensor& bias,
      const at::Tensor& old_h,
      const at::Tensor& old_cell) {
    const auto X = at::cat({old_h, input}, 1);
    const auto activations = at::addmm(bias, X, weights.t());
    const auto gates = activations.chunk(3, 1);
    const auto input_gate = gates[0].sigmoid();
    const auto output_gate = gates[1].sigmoid();
    const auto candidate = at::elu(gates[2]);
    const auto new_cell = old_cell + candidate * input_gate;
    const auto new_h = new_cell.tanh() * output_gate;
    ctx->save_for_backward(
        {new_cell, input_gate, output_gate, candidate, X, weights});
    return {new_h, new_cell};
  }

  static variable_list backward(
      AutogradContext* ctx,
      const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& input_gate = saved[1];
    const auto& output_gate = saved[2];
    const auto& candidate = saved[3];
    const auto& X = saved[4];
    const auto& weights = saved[5];
    const auto tanh_cell = saved[0].tanh();
    const auto d_output = tanh_cell * grads[0];
    const auto d_cell =
        output_gate * grads[0] * (1 - tanh_cell * tanh_cell) + grads[1];
    const auto d_elu = at::where(candidate > 0, 1, candidate + 1);
    const auto d_gates = at::cat(
        {d_cell * candidate * input_gate * (1 - input_gate),
         d_output * output_gate * (1 - output_gate),
         d_cell * input_gate * d_elu},
        1);
    const auto d_weights = d_gates.t().mm(X);
    const auto d_bias = d_gates.sum(0);
    const auto d_X = d_gates.mm(weights);
    const auto state_size = grads[0].size(1);
    return {
        d_X.slice(1, state_size),
        d_weights,
        d_bias,
        d_X.slice(1, 0, state_size),
        d_cell};
  }
};

std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  auto outputs = TutorialCell::apply(input, weights, bias, old_h, old_cell);
  return {outputs[0], outputs[1]};
}

} // namespace

TORCH_LIBRARY_FRAGMENT(lltm_benchmark, m) {
  m.def(
      "tutorial_cell(Tensor input, Tensor weights, Tensor bias, Tensor old_h,"
      " Tensor old_cell) -> (Tensor, Tensor)",
      forward);
}
