#include "ops/lltm_checks.h"

namespace lltm {

namespace {

constexpr auto kStateNames = "[batch, state_size]";

// Checks what both operators have. input and weights fix all sizes: batch and
// input_features come from input, state_size from the rows of weights. Returns
// state_size.
template <typename Arguments>
c10::SymInt check_input_and_weights(const Arguments& a) {
  check_devices(a);
  check_layouts_and_dtypes(a);
  TORCH_CHECK(
      a.input.dim() == 2,
      expected(
          a.kOperator,
          "input to have 2 dimensions [batch, input_features]",
          a.input.dim()));
  return check_weights(a.kOperator, a.weights, a.input);
}

} // namespace

void check_arguments(const ForwardArguments& a) {
  const auto state_size = check_input_and_weights(a);
  check_shape(
      a.kOperator,
      field("bias", a.bias),
      "[3 * state_size]",
      {a.weights.sym_size(0)});
  for (const auto& state :
       {field("old_h", a.old_h), field("old_cell", a.old_cell)}) {
    check_shape(
        a.kOperator, state, kStateNames, {a.input.sym_size(0), state_size});
  }
}

void check_arguments(const BackwardArguments& a) {
  const auto state_size = check_input_and_weights(a);
  for (const auto& state :
       {field("old_h", a.old_h),
        field("new_cell", a.new_cell),
        field("grad_h", a.grad_h),
        field("grad_cell", a.grad_cell)}) {
    check_shape(
        a.kOperator, state, kStateNames, {a.input.sym_size(0), state_size});
  }
  check_shape(
      a.kOperator,
      field("gates", a.gates),
      "[batch, 3 * state_size]",
      {a.input.sym_size(0), a.weights.sym_size(0)});
}

} // namespace lltm
