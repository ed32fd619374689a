// The functions of ops/lltm.h and ops/lltm_sequence.h, as a program without
// Python calls them.

#include "ops/lltm.h"
#include "ops/lltm_sequence.h"

// Not torch/torch.h, which takes three times as long to compile.
#include <ATen/core/Formatting.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <c10/util/Exception.h>

#include <tuple>

namespace {

using at::Tensor;

// The tests in Python compare the numbers.
void test_each_function_calls_its_operator() {
  const auto input = at::randn({3, 5});
  const auto weights = at::randn({12, 9}), bias = at::randn({12});
  const auto h = at::randn({3, 4}), cell = at::randn({3, 4});
  const auto [new_h, new_cell] = lltm::forward({input, weights, bias, h, cell});
  const auto [output, cells, h_n, c_n] =
      lltm::sequence_forward({input.unsqueeze(0), weights, bias, h, cell});
  TORCH_CHECK(at::equal(output[0], new_h) && at::equal(cells[0], new_cell));
  const auto [_, same_cell, gates] =
      lltm::_forward_with_gates({input, weights, bias, h, cell});
  TORCH_CHECK(at::equal(same_cell, new_cell));
  const auto [d_input, d_weights, d_bias, d_h, d_cell] = lltm::backward(
      {new_h,
       new_cell,
       new_cell,
       gates,
       input,
       weights,
       h,
       {false, true, false, false, true}});
  TORCH_CHECK(d_weights.defined() && d_cell.defined());
  TORCH_CHECK(!d_input.defined() && !d_bias.defined() && !d_h.defined());
}

// Who leaves out an argument gets the default of the schema, as in Python.
template <typename Arguments>
void check_names_and_defaults(const Arguments& arguments) {
  const auto schema = c10::Dispatcher::singleton()
                          .findSchemaOrThrow(arguments.kOperator, "")
                          .schema();
  auto argument = schema.arguments().begin();
  const auto check = [&](const auto& ours) {
    TORCH_CHECK(argument->name() == ours.name, *argument, " is ", ours.name);
    const auto& expected = argument->default_value();
    TORCH_CHECK(
        !expected || *expected == c10::IValue(ours.value),
        *argument,
        " has another default in ",
        arguments.kOperator);
    ++argument;
  };
  std::apply(
      [&](const auto&... each) { (check(each), ...); }, arguments.list());
}

void test_structs_have_the_names_and_defaults_of_the_schemas() {
  const Tensor t;
  check_names_and_defaults(lltm::ForwardArguments{t, t, t, t, t});
  check_names_and_defaults(lltm::BackwardArguments{t, t, t, t, t, t, t});
  check_names_and_defaults(lltm::SequenceForwardArguments{t, t, t, t, t});
  check_names_and_defaults(
      lltm::SequenceBackwardArguments{t, t, t, t, t, t, t, t, t, t});
}

} // namespace

int main() {
  test_each_function_calls_its_operator();
  test_structs_have_the_names_and_defaults_of_the_schemas();
  return 0;
}
