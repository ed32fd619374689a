#include "ops/lltm_checks.h"

#include <initializer_list>
#include <utility>

namespace lltm {

namespace {

constexpr auto kForward = "lltm::forward";
constexpr auto kBackward = "lltm::backward";
constexpr auto kStateNames = "[batch, state_size]";

using NamedTensor = std::pair<const char*, const at::Tensor&>;
using NamedTensors = std::initializer_list<NamedTensor>;

void check_devices(const char* op, NamedTensors args) {
  for (const auto& [name, tensor] : args) {
    TORCH_CHECK(
        tensor.defined(),
        op,
        ": expected ",
        name,
        " to be a tensor, but got an undefined tensor or None");
  }
  const auto& [first_name, first] = *args.begin();
  for (const auto& [name, tensor] : args) {
    TORCH_CHECK(
        tensor.device() == first.device(),
        op,
        ": expected ",
        name,
        " to be on the device of ",
        first_name,
        ", ",
        first.device(),
        ", but got ",
        tensor.device());
  }
}

void check_layouts_and_dtypes(const char* op, NamedTensors args) {
  const auto& [first_name, first] = *args.begin();
  const auto dtype = first.scalar_type();
  for (const auto& [name, tensor] : args) {
    TORCH_CHECK(
        tensor.layout() == at::kStrided,
        op,
        ": expected ",
        name,
        " to be a dense tensor, but got layout ",
        tensor.layout());
  }
  TORCH_CHECK(
      dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
          dtype == at::kHalf,
      op,
      ": expected ",
      first_name,
      " to have dtype Double, Float, BFloat16 or Half, but got ",
      dtype);
  for (const auto& [name, tensor] : args) {
    TORCH_CHECK(
        tensor.scalar_type() == dtype,
        op,
        ": expected ",
        name,
        " to have the dtype of ",
        first_name,
        ", ",
        dtype,
        ", but got ",
        tensor.scalar_type());
  }
}

// Sizes may be symbolic: TORCH_SYM_CHECK then records the equality instead of
// specialising on it.
void check_matrix(
    const char* op,
    const NamedTensor& arg,
    const char* names,
    const c10::SymInt& rows,
    const c10::SymInt& columns) {
  const auto& [name, tensor] = arg;
  TORCH_CHECK(
      tensor.dim() == 2,
      op,
      ": expected ",
      name,
      " to have 2 dimensions ",
      names,
      ", but got ",
      tensor.dim());
  TORCH_SYM_CHECK(
      tensor.sym_size(0).sym_eq(rows).sym_and(
          tensor.sym_size(1).sym_eq(columns)),
      op,
      ": expected ",
      name,
      " to have shape ",
      names,
      " = [",
      rows,
      ", ",
      columns,
      "], but got ",
      tensor.sym_sizes());
}

struct Sizes {
  c10::SymInt batch;
  c10::SymInt state_size;
};

// input and weights fix all sizes: batch and input_features come from input,
// state_size from the rows of weights.
Sizes check_input_and_weights(
    const char* op,
    const at::Tensor& input,
    const at::Tensor& weights) {
  TORCH_CHECK(
      input.dim() == 2,
      op,
      ": expected input to have 2 dimensions [batch, input_features], ",
      "but got ",
      input.dim());
  constexpr auto weights_names =
      "[3 * state_size, state_size + input_features]";
  TORCH_CHECK(
      weights.dim() == 2,
      op,
      ": expected weights to have 2 dimensions ",
      weights_names,
      ", but got ",
      weights.dim());
  const auto rows = weights.sym_size(0);
  TORCH_SYM_CHECK(
      (rows % 3).sym_eq(0),
      op,
      ": expected weights to have shape ",
      weights_names,
      " with a number of rows divisible by 3, but got ",
      weights.sym_sizes());
  const auto state_size = rows / 3;
  const auto columns = state_size + input.sym_size(1);
  TORCH_SYM_CHECK(
      weights.sym_size(1).sym_eq(columns),
      op,
      ": expected weights to have shape ",
      weights_names,
      " = [",
      rows,
      ", ",
      columns,
      "] for input of shape ",
      input.sym_sizes(),
      ", but got ",
      weights.sym_sizes());
  return {input.sym_size(0), state_size};
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
  const auto sizes = check_input_and_weights(kForward, input, weights);
  TORCH_CHECK(
      bias.dim() == 1,
      kForward,
      ": expected bias to have 1 dimension [3 * state_size], ",
      "but got ",
      bias.dim());
  TORCH_SYM_CHECK(
      bias.sym_size(0).sym_eq(weights.sym_size(0)),
      kForward,
      ": expected bias to have shape [3 * state_size] = [",
      weights.sym_size(0),
      "], but got ",
      bias.sym_sizes());
  for (const auto& arg :
       NamedTensors{{"old_h", old_h}, {"old_cell", old_cell}}) {
    check_matrix(kForward, arg, kStateNames, sizes.batch, sizes.state_size);
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
  const auto sizes = check_input_and_weights(kBackward, input, weights);
  for (const auto& arg : NamedTensors{
           {"old_h", old_h},
           {"new_cell", new_cell},
           {"grad_h", grad_h},
           {"grad_cell", grad_cell}}) {
    check_matrix(kBackward, arg, kStateNames, sizes.batch, sizes.state_size);
  }
  check_matrix(
      kBackward,
      {"gates", gates},
      "[batch, 3 * state_size]",
      sizes.batch,
      weights.sym_size(0));
}

} // namespace lltm
