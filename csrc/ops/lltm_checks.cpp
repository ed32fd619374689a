#include "ops/lltm_checks.h"

#include "ops/checks.h"

namespace lltm {

namespace {

constexpr auto kForward = "lltm::forward";
constexpr auto kBackward = "lltm::backward";
constexpr auto kStateNames = "[batch, state_size]";

// input and weights fix all sizes: batch and input_features come from input,
// state_size from the rows of weights. Returns state_size.
c10::SymInt check_input_and_weights(
    const char* op,
    const at::Tensor& input,
    const at::Tensor& weights) {
  TORCH_CHECK(
      input.dim() == 2,
      op,
      ": expected input to have 2 dimensions [batch, input_features], ",
      "but got ",
      input.dim());
  return check_weights(op, weights, input);
}

} // namespace

void check_forward_devices(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_devices(
      kForward,
      {{"input", input},
       {"weights", weights},
       {"bias", bias},
       {"old_h", old_h},
       {"old_cell", old_cell}});
}

void check_forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& old_h,
    const at::Tensor& old_cell) {
  check_forward_devices(input, weights, bias, old_h, old_cell);
  check_layouts_and_dtypes(
      kForward,
      {{"input", input},
       {"weights", weights},
       {"bias", bias},
       {"old_h", old_h},
       {"old_cell", old_cell}});
  const auto state_size = check_input_and_weights(kForward, input, weights);
  check_shape(
      kForward, {"bias", bias}, "[3 * state_size]", {weights.sym_size(0)});
  for (const auto& arg :
       NamedTensors{{"old_h", old_h}, {"old_cell", old_cell}}) {
    check_shape(kForward, arg, kStateNames, {input.sym_size(0), state_size});
  }
}

void check_backward_devices(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h) {
  check_devices(
      kBackward,
      {{"input", input},
       {"weights", weights},
       {"old_h", old_h},
       {"new_cell", new_cell},
       {"gates", gates},
       {"grad_h", grad_h},
       {"grad_cell", grad_cell}});
}

void check_backward(
    const at::Tensor& grad_h,
    const at::Tensor& grad_cell,
    const at::Tensor& new_cell,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& old_h) {
  check_backward_devices(
      grad_h, grad_cell, new_cell, gates, input, weights, old_h);
  check_layouts_and_dtypes(
      kBackward,
      {{"input", input},
       {"weights", weights},
       {"old_h", old_h},
       {"new_cell", new_cell},
       {"gates", gates},
       {"grad_h", grad_h},
       {"grad_cell", grad_cell}});
  const auto batch = input.sym_size(0);
  const auto state_size = check_input_and_weights(kBackward, input, weights);
  for (const auto& arg : NamedTensors{
           {"old_h", old_h},
           {"new_cell", new_cell},
           {"grad_h", grad_h},
           {"grad_cell", grad_cell}}) {
    check_shape(kBackward, arg, kStateNames, {batch, state_size});
  }
  check_shape(
      kBackward,
      {"gates", gates},
      "[batch, 3 * state_size]",
      {batch, weights.sym_size(0)});
}

} // namespace lltm
