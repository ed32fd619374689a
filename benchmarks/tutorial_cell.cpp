// The peer that extension tutorials teach: the cell in C++, out of ATen's
// operators, its backward written by hand; registered with the dispatcher.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Step {
  at::Tensor X, input_gate, output_gate, candidate, new_h, new_cell;
};

Step step(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  const auto X = at::cat({old_h, input}, 1);
  const auto gates = at::addmm(bias, X, weights.t()).chunk(3, 1);
  const auto input_gate = gates[0].sigmoid();
  const auto output_gate = gates[1].sigmoid();
  const auto candidate = at::elu(gates[2]);
  const auto new_cell = old_cell + candidate * input_gate;
  const auto new_h = new_cell.tanh() * output_gate;
  return {X, input_gate, output_gate, candidate, new_h, new_cell};
}

struct TutorialCell : torch::autograd::Function<TutorialCell> {
  static variable_list forward(
      AutogradContext* ctx,
      const at::Tensor& input,
      const at::Tensor& weights,
      const at::Tensor& bias,
      const at::Tensor& old_h,
      const at::Tensor& old_cell) {
    const auto s = step(input, weights, bias, old_h, old_cell);
    ctx->save_for_backward(
        {s.new_cell, s.input_gate, s.output_gate, s.candidate, s.X, weights});
    return {s.new_h, s.new_cell};
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
    at::Tensor d_input, d_old_h;
    // Tutorials compute it always; the others here do not.
    if (ctx->needs_input_grad(0) || ctx->needs_input_grad(3)) {
      const auto d_X = d_gates.mm(weights);
      const auto state_size = grads[0].size(1);
      d_input = d_X.slice(1, state_size);
      d_old_h = d_X.slice(1, 0, state_size);
    }
    return {d_input, d_weights, d_bias, d_old_h, d_cell};
  }
};

std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  if (!at::GradMode::is_enabled()) {
    auto s = step(input, weights, bias, old_h, old_cell);
    return {s.new_h, s.new_cell};
  }
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
