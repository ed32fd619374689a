#include "ops/checks.h"

namespace lltm {

void check_defined(const char* op, const Field<at::Tensor>& argument) {
  TORCH_CHECK(
      argument.value.defined(),
      expected(
          op,
          c10::str(argument.name, " to be a tensor"),
          "an undefined tensor or None"));
  TORCH_CHECK(
      !argument.value.is_nested(),
      expected(
          op,
          c10::str(argument.name, " to be a dense tensor"),
          "a nested tensor"));
}

void check_device(
    const char* op,
    const Field<at::Tensor>& argument,
    const at::Tensor& input) {
  check_defined(op, argument);
  const auto device = argument.value.device();
  if (argument.place == Place::kCPU) {
    // Meta is accepted where input is on meta: fake tensors show meta instead
    // of their device.
    TORCH_CHECK(
        device.is_cpu() || (device.is_meta() && input.is_meta()),
        expected(op, c10::str(argument.name, " to be on the CPU"), device));
    return;
  }
  TORCH_CHECK(
      device == input.device(),
      expected(
          op,
          c10::str(
              argument.name, " to be on the device of input, ", input.device()),
          device));
}

void check_layout_and_dtype(
    const char* op,
    const Field<at::Tensor>& argument,
    const at::Tensor& input) {
  TORCH_CHECK(
      argument.value.layout() == at::kStrided,
      expected(
          op,
          c10::str(argument.name, " to be a dense tensor"),
          c10::str("layout ", argument.value.layout())));
  const auto dtype = input.scalar_type();
  TORCH_CHECK(
      dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
          dtype == at::kHalf,
      expected(
          op, "input to have dtype Double, Float, BFloat16 or Half", dtype));
  TORCH_CHECK(
      argument.value.scalar_type() == dtype,
      expected(
          op,
          c10::str(argument.name, " to have the dtype of input, ", dtype),
          argument.value.scalar_type()));
}

void check_shape(
    const char* op,
    const Field<at::Tensor>& argument,
    const char* names,
    c10::SymIntArrayRef sizes) {
  const auto& [name, tensor, batch_dim, place] = argument;
  const auto dim = static_cast<int64_t>(sizes.size());
  TORCH_CHECK(
      tensor.dim() == dim,
      expected(
          op,
          c10::str(
              name,
              " to have ",
              dim,
              dim == 1 ? " dimension " : " dimensions ",
              names),
          tensor.dim()));
  // TORCH_SYM_CHECK records the equality instead of specialising on it.
  auto equal = c10::SymBool(true);
  for (int64_t i = 0; i < dim; ++i) {
    equal = equal.sym_and(tensor.sym_size(i).sym_eq(sizes[i]));
  }
  TORCH_SYM_CHECK(
      equal,
      expected(
          op,
          c10::str(name, " to have shape ", names, " = ", sizes),
          tensor.sym_sizes()));
}

c10::SymInt check_weights(
    const char* op,
    const at::Tensor& weights,
    const at::Tensor& input) {
  constexpr auto names = "[3 * state_size, state_size + input_features]";
  TORCH_CHECK(
      weights.dim() == 2,
      expected(
          op, c10::str("weights to have 2 dimensions ", names), weights.dim()));
  const auto rows = weights.sym_size(0);
  TORCH_SYM_CHECK(
      (rows % 3).sym_eq(0),
      expected(
          op,
          c10::str(
              "weights to have shape ",
              names,
              " with a number of rows divisible by 3"),
          weights.sym_sizes()));
  auto state_size = rows / 3;
  const auto columns = state_size + input.sym_size(-1);
  TORCH_SYM_CHECK(
      weights.sym_size(1).sym_eq(columns),
      expected(
          op,
          c10::str(
              "weights to have shape ",
              names,
              " = [",
              rows,
              ", ",
              columns,
              "] for input of shape ",
              input.sym_sizes()),
          weights.sym_sizes()));
  return state_size;
}

} // namespace lltm
