#include "ops/lltm_sequence_checks.h"

#include <ATen/functorch/BatchedTensorImpl.h>

namespace lltm {

namespace {

constexpr auto kStateNames = "[batch, state_size]";

void check_dense(
    const char* op,
    const Field<at::Tensor>& argument,
    at::ScalarType dtype) {
  const auto& tensor = argument.value;
  TORCH_CHECK(
      tensor.scalar_type() == dtype && tensor.layout() == at::kStrided,
      expected(
          op,
          c10::str(argument.name, " to be dense with dtype ", dtype),
          c10::str(
              "layout ",
              tensor.layout(),
              " with dtype ",
              tensor.scalar_type())));
}

void check_batch_sizes(const char* op, const at::Tensor& batch_sizes) {
  TORCH_CHECK(
      at::functorch::maybeGetBatchedImpl(batch_sizes) == nullptr,
      expected(
          op,
          "batch_sizes to be the same for all that vmap maps",
          "one that is mapped"));
  TORCH_CHECK(
      batch_sizes.dim() == 1,
      expected(
          op, "batch_sizes to have 1 dimension [time]", batch_sizes.dim()));
  check_dense(op, field("batch_sizes", batch_sizes), at::kLong);
}

void check_resets(
    const char* op,
    const at::Tensor& resets,
    const at::Tensor& input,
    bool packed) {
  check_dense(op, field("resets", resets), at::kBool);
  const auto sizes = input.sym_sizes();
  check_shape(
      op,
      field("resets", resets),
      packed ? "[sum(batch_sizes)]" : "[time, batch]",
      sizes.slice(0, sizes.size() - 1));
}

struct Sizes {
  c10::SymInt batch;
  c10::SymInt state_size;
};

// Checks what both operators have.
template <typename Arguments>
Sizes check_shared_arguments(const Arguments& a) {
  check_devices(a);
  check_layouts_and_dtypes(a);
  const auto op = a.kOperator;
  const bool packed = a.batch_sizes.has_value();
  TORCH_CHECK(
      a.input.dim() == (packed ? 2 : 3),
      expected(
          op,
          packed
              ? "input to have 2 dimensions [sum(batch_sizes), input_features]"
              : "input to have 3 dimensions [time, batch, input_features]",
          a.input.dim()));
  auto state_size = check_weights(op, a.weights, a.input);
  if (packed) {
    check_batch_sizes(op, *a.batch_sizes);
    TORCH_CHECK(
        a.h0.dim() == 2,
        expected(
            op, "h0 to have 2 dimensions [batch, state_size]", a.h0.dim()));
  }
  if (a.resets) {
    check_resets(op, *a.resets, a.input, packed);
  }
  auto batch = packed ? a.h0.sym_size(0) : a.input.sym_size(1);
  check_shape(op, field("h0", a.h0), kStateNames, {batch, state_size});
  return {std::move(batch), std::move(state_size)};
}

} // namespace

void check_arguments(const SequenceForwardArguments& a) {
  const auto [batch, state_size] = check_shared_arguments(a);
  check_shape(
      a.kOperator,
      field("bias", a.bias),
      "[3 * state_size]",
      {a.weights.sym_size(0)});
  check_shape(a.kOperator, field("c0", a.c0), kStateNames, {batch, state_size});
}

void check_arguments(const SequenceBackwardArguments& a) {
  const auto state_size = check_shared_arguments(a).state_size;
  const bool packed = a.batch_sizes.has_value();
  auto sizes = a.input.sym_sizes().vec();
  sizes.back() = state_size;
  for (const auto& states :
       {field("output", a.output),
        field("cells", a.cells),
        field("grad_output", a.grad_output),
        field("grad_cells", a.grad_cells)}) {
    check_shape(
        a.kOperator,
        states,
        packed ? "[sum(batch_sizes), state_size]" : "[time, batch, state_size]",
        sizes);
  }
  sizes.back() = a.weights.sym_size(0);
  check_shape(
      a.kOperator,
      field("gates", a.gates),
      packed ? "[sum(batch_sizes), 3 * state_size]"
             : "[time, batch, 3 * state_size]",
      sizes);
}

} // namespace lltm
