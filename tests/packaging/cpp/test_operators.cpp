// The functions of ops/lltm.h and ops/lltm_sequence.h, as a program without
// Python calls them.

#include "ops/lltm.h"
#include "ops/lltm_sequence.h"

// Not torch/torch.h, which takes three times as long to compile.
#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/elu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <tuple>
#include <vector>

namespace {

using at::Tensor;

struct Arguments {
  Tensor input;
  Tensor weights;
  Tensor bias;
  Tensor old_h;
  Tensor old_cell;
};

Tensor random(at::IntArrayRef sizes) {
  return at::randn(sizes, at::kDouble).requires_grad_();
}

Arguments arguments(at::IntArrayRef lead, int64_t batch) {
  auto sizes = lead.vec();
  sizes.push_back(5);
  return {
      random(sizes),
      random({12, 9}),
      random({12}),
      random({batch, 4}),
      random({batch, 4})};
}

// The mathematics, in plain ATen.
lltm::ForwardResult reference(const Arguments& a) {
  const auto gates =
      at::linear(at::cat({a.old_h, a.input}, 1), a.weights, a.bias).chunk(3, 1);
  const auto new_cell = a.old_cell + at::elu(gates[2]) * at::sigmoid(gates[0]);
  return {at::tanh(new_cell) * at::sigmoid(gates[1]), new_cell};
}

void check_close(const Tensor& actual, const Tensor& expected) {
  TORCH_CHECK(
      at::allclose(actual, expected, 1e-10, 1e-12),
      "expected ",
      expected,
      ", but got ",
      actual);
}

// Also the loss of both, which autograd takes to every argument.
void check_same(
    const lltm::ForwardResult& actual,
    const lltm::ForwardResult& expected,
    const Arguments& a) {
  const auto gradients = [&](const lltm::ForwardResult& outputs) {
    const auto& [h, cell] = outputs;
    return torch::autograd::grad(
        {(h * h).sum() + cell.sum()},
        {a.input, a.weights, a.bias, a.old_h, a.old_cell});
  };
  check_close(std::get<0>(actual), std::get<0>(expected));
  check_close(std::get<1>(actual), std::get<1>(expected));
  const auto ours = gradients(actual), exact = gradients(expected);
  for (size_t i = 0; i < ours.size(); ++i) {
    check_close(ours[i], exact[i]);
  }
}

void test_a_step() {
  const auto a = arguments({3}, 3);
  check_same(
      lltm::forward({a.input, a.weights, a.bias, a.old_h, a.old_cell}),
      reference(a),
      a);
}

void test_backward_computes_what_is_asked_for() {
  const at::NoGradGuard no_grad;
  const auto a = arguments({3}, 3);
  const auto [new_h, new_cell, gates] = lltm::_forward_with_gates(
      {a.input, a.weights, a.bias, a.old_h, a.old_cell});
  const auto [d_input, d_weights, d_bias, d_old_h, d_old_cell] = lltm::backward(
      {new_h,
       new_cell,
       new_cell,
       gates,
       a.input,
       a.weights,
       a.old_h,
       {false, true, false, false, true}});
  TORCH_CHECK(d_weights.defined() && d_old_cell.defined());
  TORCH_CHECK(!d_input.defined() && !d_bias.defined() && !d_old_h.defined());
}

void test_a_sequence() {
  const auto a = arguments({6, 3}, 3);
  auto step = a;
  std::vector<Tensor> output, cells;
  for (int64_t t = 0; t < 6; ++t) {
    step.input = a.input[t];
    std::tie(step.old_h, step.old_cell) = reference(step);
    output.push_back(step.old_h);
    cells.push_back(step.old_cell);
  }
  check_same(
      lltm::sequence_forward({a.input, a.weights, a.bias, a.old_h, a.old_cell}),
      {at::stack(output), at::stack(cells)},
      a);
}

// Who leaves out an argument gets the default of the schema, as in Python.
template <typename Arguments>
void check_names_and_defaults(const Arguments& arguments) {
  const auto& schema = c10::Dispatcher::singleton()
                           .findSchemaOrThrow(arguments.kOperator, "")
                           .schema();
  auto argument = schema.arguments().begin();
  const auto check = [&](const auto& field) {
    TORCH_CHECK(argument->name() == field.name, *argument, " is ", field.name);
    const auto& expected = argument->default_value();
    TORCH_CHECK(
        !expected || *expected == c10::IValue(field.value),
        *argument,
        " has another default in ",
        arguments.kOperator);
    ++argument;
  };
  std::apply(
      [&](const auto&... fields) { (check(fields), ...); }, arguments.fields());
}

void test_structs_have_the_names_and_defaults_of_the_schemas() {
  const Tensor t;
  check_names_and_defaults(lltm::ForwardArguments{t, t, t, t, t});
  check_names_and_defaults(lltm::BackwardArguments{t, t, t, t, t, t, t});
  check_names_and_defaults(lltm::SequenceForwardArguments{t, t, t, t, t});
  check_names_and_defaults(
      lltm::SequenceBackwardArguments{t, t, t, t, t, t, t, t});
}

} // namespace

int main() {
  test_a_step();
  test_backward_computes_what_is_asked_for();
  test_a_sequence();
  test_structs_have_the_names_and_defaults_of_the_schemas();
  return 0;
}
