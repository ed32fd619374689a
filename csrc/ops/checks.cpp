#include "ops/checks.h"

#include <ATen/functorch/BatchedTensorImpl.h>

#include <algorithm>
#include <utility>

namespace lltm {

namespace {

// For batch_sizes and resets. One that stays on the CPU has its values read.
void check_own_dtype(const char* op, const Field<at::Tensor>& argument) {
  const auto& tensor = argument.value;
  TORCH_CHECK(
      argument.place != Place::kCPU ||
          at::functorch::maybeGetBatchedImpl(tensor) == nullptr,
      expected(
          op,
          argument,
          "to be the same for all that vmap maps",
          "one that is mapped"));
  TORCH_CHECK(
      tensor.scalar_type() == argument.dtype && tensor.layout() == at::kStrided,
      expected(
          op,
          argument,
          c10::str("to be dense with dtype ", argument.dtype),
          c10::str(
              "layout ",
              tensor.layout(),
              " with dtype ",
              tensor.scalar_type())));
}

// In the order of Dim.
constexpr std::array<const char*, kNumberOfDims> kNames{
    "",
    "batch",
    "time",
    "sum(batch_sizes)",
    "input_features",
    "state_size",
    "3 * state_size",
    "state_size + input_features"};

int64_t dims(const Shape& shape) {
  return std::find(shape.begin(), shape.end(), Dim::kNone) - shape.begin();
}

// "[batch, state_size]"
std::string names(const Shape& shape) {
  std::string names = "[";
  for (int64_t i = 0; i < dims(shape); ++i) {
    names += i == 0 ? "" : ", ";
    names += kNames[static_cast<size_t>(shape[i])];
  }
  return names + "]";
}

void check_dims(const char* op, const Field<at::Tensor>& argument) {
  const auto expected_dims = dims(argument.shape);
  TORCH_CHECK(
      argument.value.dim() == expected_dims,
      expected(
          op,
          argument,
          c10::str(
              "to have ",
              expected_dims,
              expected_dims == 1 ? " dimension " : " dimensions ",
              names(argument.shape)),
          argument.value.dim()));
}

} // namespace

void check_device(
    const char* op,
    const Field<at::Tensor>& argument,
    const at::Tensor& input) {
  TORCH_CHECK(
      argument.value.defined(),
      expected(op, argument, "to be a tensor", "an undefined tensor or None"));
  TORCH_CHECK(
      !argument.value.is_nested(),
      expected(op, argument, "to be a dense tensor", "a nested tensor"));
  const auto device = argument.value.device();
  if (argument.place == Place::kCPU) {
    // Meta is accepted where input is on meta: fake tensors show meta instead
    // of their device.
    TORCH_CHECK(
        device.is_cpu() || (device.is_meta() && input.is_meta()),
        expected(op, argument, "to be on the CPU", device));
    return;
  }
  TORCH_CHECK(
      device == input.device(),
      expected(
          op,
          argument,
          c10::str("to be on the device of input, ", input.device()),
          device));
}

void check_layout_and_dtype(
    const char* op,
    const Field<at::Tensor>& argument,
    const at::Tensor& input) {
  if (argument.dtype != at::ScalarType::Undefined) {
    return check_own_dtype(op, argument);
  }
  TORCH_CHECK(
      argument.value.layout() == at::kStrided,
      expected(
          op,
          argument,
          "to be a dense tensor",
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
          argument,
          c10::str("to have the dtype of input, ", dtype),
          argument.value.scalar_type()));
}

Sizes::Sizes(
    const char* op,
    const Field<at::Tensor>& input,
    const at::Tensor& weights)
    : op_(op) {
  check(input);
  // The rows of weights give state_size, so this can say more than check().
  const auto argument = Field{"weights", weights, kShapeOfWeights};
  check_dims(op_, argument);
  const auto rows = weights.sym_size(0);
  TORCH_SYM_CHECK(
      (rows % 3).sym_eq(0),
      expected(
          op_,
          argument,
          c10::str(
              "to have shape ",
              names(argument.shape),
              " with a number of rows divisible by 3"),
          weights.sym_sizes()));
  auto state_size = rows / 3;
  const auto columns = state_size + input.value.sym_size(-1);
  TORCH_SYM_CHECK(
      weights.sym_size(1).sym_eq(columns),
      expected(
          op_,
          argument,
          c10::str(
              "to have shape ",
              names(argument.shape),
              " = [",
              rows,
              ", ",
              columns,
              "] for input of shape ",
              input.value.sym_sizes()),
          weights.sym_sizes()));
  sizes_[static_cast<size_t>(Dim::kStateSize)] = std::move(state_size);
  check(argument);
}

void Sizes::check(const Field<at::Tensor>& argument) {
  check_dims(op_, argument);
  const auto sizes = argument.value.sym_sizes();
  // TORCH_SYM_CHECK records the equality instead of specialising on it.
  auto equal = c10::SymBool(true);
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto& known = sizes_[static_cast<size_t>(argument.shape[i])];
    if (known) {
      equal = equal.sym_and(sizes[i].sym_eq(*known));
    } else {
      known = sizes[i];
    }
  }
  TORCH_SYM_CHECK(
      equal,
      expected(
          op_,
          argument,
          c10::str(
              "to have shape ",
              names(argument.shape),
              " = ",
              c10::SymIntArrayRef(of(argument.shape))),
          sizes));
  // Results take these sizes. A symbol of a tensor is simpler than the symbol
  // of weights divided by 3.
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes_[static_cast<size_t>(argument.shape[i])] = sizes[i];
  }
}

std::vector<c10::SymInt> Sizes::of(const Shape& shape) const {
  std::vector<c10::SymInt> sizes;
  for (int64_t i = 0; i < dims(shape); ++i) {
    sizes.push_back(*sizes_[static_cast<size_t>(shape[i])]);
  }
  return sizes;
}

} // namespace lltm
