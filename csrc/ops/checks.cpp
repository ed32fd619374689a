#include "ops/checks.h"

namespace lltm {

void check_devices(const char* op, NamedTensors args) {
  for (const auto& [name, tensor] : args) {
    TORCH_CHECK(
        tensor.defined(),
        op,
        ": expected ",
        name,
        " to be a tensor, but got an undefined tensor or None");
    // Here, for the Autograd kernels would fail over their sizes.
    TORCH_CHECK(
        !tensor.is_nested(),
        op,
        ": expected ",
        name,
        " to be a dense tensor, but got a nested tensor");
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

void check_shape(
    const char* op,
    const NamedTensor& arg,
    const char* names,
    c10::SymIntArrayRef expected) {
  const auto& [name, tensor] = arg;
  const auto dim = static_cast<int64_t>(expected.size());
  TORCH_CHECK(
      tensor.dim() == dim,
      op,
      ": expected ",
      name,
      " to have ",
      dim,
      dim == 1 ? " dimension " : " dimensions ",
      names,
      ", but got ",
      tensor.dim());
  // TORCH_SYM_CHECK records the equality instead of specialising on it.
  auto equal = c10::SymBool(true);
  for (int64_t i = 0; i < dim; ++i) {
    equal = equal.sym_and(tensor.sym_size(i).sym_eq(expected[i]));
  }
  TORCH_SYM_CHECK(
      equal,
      op,
      ": expected ",
      name,
      " to have shape ",
      names,
      " = ",
      expected,
      ", but got ",
      tensor.sym_sizes());
}

c10::SymInt check_weights(
    const char* op,
    const at::Tensor& weights,
    const at::Tensor& input) {
  constexpr auto names = "[3 * state_size, state_size + input_features]";
  TORCH_CHECK(
      weights.dim() == 2,
      op,
      ": expected weights to have 2 dimensions ",
      names,
      ", but got ",
      weights.dim());
  const auto rows = weights.sym_size(0);
  TORCH_SYM_CHECK(
      (rows % 3).sym_eq(0),
      op,
      ": expected weights to have shape ",
      names,
      " with a number of rows divisible by 3, but got ",
      weights.sym_sizes());
  const auto state_size = rows / 3;
  const auto columns = state_size + input.sym_size(-1);
  TORCH_SYM_CHECK(
      weights.sym_size(1).sym_eq(columns),
      op,
      ": expected weights to have shape ",
      names,
      " = [",
      rows,
      ", ",
      columns,
      "] for input of shape ",
      input.sym_sizes(),
      ", but got ",
      weights.sym_sizes());
  return state_size;
}

} // namespace lltm
