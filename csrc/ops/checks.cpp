#include "ops/checks.h"

#include <ATen/functorch/BatchedTensorImpl.h>

#include <algorithm>

namespace lltm {

namespace {

void check_device(
    const char* op,
    const Argument<at::Tensor>& argument,
    const at::Tensor& input) {
  const auto device = argument.value.device();
  if (!argument.on_cpu) {
    TORCH_CHECK(
        device == input.device(),
        expected(
            op,
            argument,
            c10::str("to be on the device of input, ", input.device()),
            device));
    return;
  }
  // Meta is accepted where input is on meta: fake tensors show meta instead of
  // their device.
  TORCH_CHECK(
      device.is_cpu() || (device.is_meta() && input.is_meta()),
      expected(op, argument, "to be on the CPU", device));
  TORCH_CHECK(
      at::functorch::maybeGetBatchedImpl(argument.value) == nullptr,
      expected(
          op,
          argument,
          "to be the same for all that vmap maps",
          "one that is mapped"));
}

void check_dtype(
    const char* op,
    const Argument<at::Tensor>& argument,
    at::ScalarType dtype_of_input) {
  const auto dtype = argument.value.scalar_type();
  const bool has_own = argument.dtype != at::ScalarType::Undefined;
  const auto wanted = has_own ? argument.dtype : dtype_of_input;
  TORCH_CHECK(
      dtype == wanted,
      expected(
          op,
          argument,
          c10::str(
              has_own ? "to have dtype " : "to have the dtype of input, ",
              wanted),
          dtype));
  TORCH_CHECK(
      has_own || dtype == at::kDouble || dtype == at::kFloat ||
          dtype == at::kBFloat16 || dtype == at::kHalf,
      expected(
          op,
          argument,
          "to have dtype Double, Float, BFloat16 or Half",
          dtype));
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

} // namespace

void check_tensor(
    const char* op,
    const Argument<at::Tensor>& argument,
    const at::Tensor& input) {
  const auto& tensor = argument.value;
  TORCH_CHECK(
      tensor.defined(),
      expected(op, argument, "to be a tensor", "an undefined tensor or None"));
  TORCH_CHECK(
      !tensor.is_nested(),
      expected(op, argument, "to be a dense tensor", "a nested tensor"));
  TORCH_CHECK(
      tensor.layout() == at::kStrided,
      expected(
          op,
          argument,
          "to be a dense tensor",
          c10::str("layout ", tensor.layout())));
  check_device(op, argument, input);
  check_dtype(op, argument, input.scalar_type());
}

Sizes::Sizes(
    const char* op,
    const Argument<at::Tensor>& input,
    const Argument<at::Tensor>& weights)
    : op_(op) {
  check(input);
  check(weights);
  const auto state_size = *size(Dim::kGates) / 3;
  size(Dim::kStateSize) = state_size;
  size(Dim::kGates) = state_size * 3;
  size(Dim::kFeatures) = state_size + *size(Dim::kInputFeatures);
  check(weights);
}

void Sizes::check(const Argument<at::Tensor>& argument) {
  const auto sizes = argument.value.sym_sizes();
  TORCH_CHECK(
      static_cast<int64_t>(sizes.size()) == dims(argument.shape),
      expected(
          op_,
          argument,
          c10::str("to have shape ", names(argument.shape)),
          sizes));
  // TORCH_SYM_CHECK records the equality instead of specialising on it.
  auto equal = c10::SymBool(true);
  for (size_t i = 0; i < sizes.size(); ++i) {
    auto& known = size(argument.shape[i]);
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
    size(argument.shape[i]) = sizes[i];
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
