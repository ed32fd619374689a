#include "ops/checks.h"

#include <ATen/functorch/BatchedTensorImpl.h>

#include <algorithm>

namespace lltm {

namespace {

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
std::string names_of(const Shape& shape) {
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
  const auto fault = [&](const auto& what, const auto& got) {
    return expected(op, argument, what, got);
  };
  const auto& tensor = argument.value;
  TORCH_CHECK(
      tensor.defined(), fault("to be a tensor", "an undefined tensor or None"));
  TORCH_CHECK(
      !tensor.is_nested(), fault("to be a dense tensor", "a nested tensor"));
  TORCH_CHECK(
      tensor.layout() == at::kStrided,
      fault("to be a dense tensor", c10::str("layout ", tensor.layout())));
  const auto device = tensor.device();
  if (argument.on_cpu) {
    // Meta is accepted where input is on meta: fake tensors show meta instead
    // of their device.
    TORCH_CHECK(
        device.is_cpu() || (device.is_meta() && input.is_meta()),
        fault("to be on the CPU", device));
    TORCH_CHECK(
        at::functorch::maybeGetBatchedImpl(tensor) == nullptr,
        fault("to be the same for all that vmap maps", "one that is mapped"));
  } else {
    const auto wanted = input.device();
    TORCH_CHECK(
        device == wanted,
        fault(c10::str("to be on the device of input, ", wanted), device));
  }
  const auto dtype = tensor.scalar_type();
  if (argument.dtype != at::ScalarType::Undefined) {
    TORCH_CHECK(
        dtype == argument.dtype,
        fault(c10::str("to have dtype ", argument.dtype), dtype));
  } else {
    const auto wanted = input.scalar_type();
    TORCH_CHECK(
        dtype == wanted,
        fault(c10::str("to have the dtype of input, ", wanted), dtype));
    TORCH_CHECK(
        dtype == at::kDouble || dtype == at::kFloat || dtype == at::kBFloat16 ||
            dtype == at::kHalf,
        fault("to have dtype Double, Float, BFloat16 or Half", dtype));
  }
}

Sizes::Sizes(
    const char* op,
    const Argument<at::Tensor>& input,
    const Argument<at::Tensor>& weights)
    : op_(op) {
  unify(input);
  unify(weights); // takes its sizes as they are
  const auto state_size = *size(Dim::kGateUnits) / 3;
  size(Dim::kStateSize) = state_size;
  size(Dim::kGateUnits) = state_size * 3;
  size(Dim::kFeatures) = state_size + *size(Dim::kInputFeatures);
  unify(weights);
}

void Sizes::unify(const Argument<at::Tensor>& argument) {
  const auto sizes = argument.value.sym_sizes();
  const auto to_have_shape = [&](const auto&... more) {
    return c10::str("to have shape ", names_of(argument.shape), more...);
  };
  TORCH_CHECK(
      static_cast<int64_t>(sizes.size()) == dims(argument.shape),
      expected(op_, argument, to_have_shape(), sizes));
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
          to_have_shape(" = ", c10::SymIntArrayRef(of(argument.shape))),
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
