#include "ops/lltm_sequence_checks.h"

#include "ops/checks.h"

namespace lltm {

namespace {

void check_optional_devices(
    const char* op,
    const at::Tensor& input,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets) {
  // Beside others on meta: fake tensors hide their device as that.
  TORCH_CHECK(
      !batch_sizes || batch_sizes->is_cpu() ||
          (batch_sizes->is_meta() && input.is_meta()),
      op,
      ": expected batch_sizes to be on the CPU, but got ",
      batch_sizes->device());
  if (resets) {
    check_devices(op, {{"input", input}, {"resets", *resets}});
  }
}

const char* names_of_sizes(bool packed, const char* time, const char* rows) {
  return packed ? rows : time;
}

struct Sizes {
  c10::SymInt batch;
  c10::SymInt state_size;
};

// What both operators share: all but the tensors with a row for each of input.
Sizes check_sizes(
    const char* op,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets) {
  const bool packed = batch_sizes.has_value();
  TORCH_CHECK(
      input.dim() == (packed ? 2 : 3),
      op,
      ": expected input to have ",
      names_of_sizes(
          packed,
          "3 dimensions [time, batch, input_features]",
          "2 dimensions [sum(batch_sizes), input_features]"),
      ", but got ",
      input.dim());
  const auto state_size = check_weights(op, weights, input);
  if (packed) {
    TORCH_CHECK(
        batch_sizes->dim() == 1,
        op,
        ": expected batch_sizes to have 1 dimension [time], but got ",
        batch_sizes->dim());
    TORCH_CHECK(
        batch_sizes->scalar_type() == at::kLong &&
            batch_sizes->layout() == at::kStrided,
        op,
        ": expected batch_sizes to be dense with dtype Long, but got layout ",
        batch_sizes->layout(),
        " with dtype ",
        batch_sizes->scalar_type());
    TORCH_CHECK(
        h0.dim() == 2,
        op,
        ": expected h0 to have 2 dimensions [batch, state_size], but got ",
        h0.dim());
  }
  const auto batch = packed ? h0.sym_size(0) : input.sym_size(1);
  if (resets) {
    TORCH_CHECK(
        resets->scalar_type() == at::kBool && resets->layout() == at::kStrided,
        op,
        ": expected resets to be dense with dtype Bool, but got layout ",
        resets->layout(),
        " with dtype ",
        resets->scalar_type());
    const auto sizes = input.sym_sizes();
    check_shape(
        op,
        {"resets", *resets},
        names_of_sizes(packed, "[time, batch]", "[sum(batch_sizes)]"),
        sizes.slice(0, sizes.size() - 1));
  }
  return {batch, state_size};
}

constexpr auto kStateNames = "[batch, state_size]";

} // namespace

void check_sequence_forward_devices(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets) {
  check_devices(
      kSequenceForward,
      {{"input", input},
       {"weights", weights},
       {"bias", bias},
       {"h0", h0},
       {"c0", c0}});
  check_optional_devices(kSequenceForward, input, batch_sizes, resets);
}

void check_sequence_forward(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets) {
  check_sequence_forward_devices(
      input, weights, bias, h0, c0, batch_sizes, resets);
  check_layouts_and_dtypes(
      kSequenceForward,
      {{"input", input},
       {"weights", weights},
       {"bias", bias},
       {"h0", h0},
       {"c0", c0}});
  const auto [batch, state_size] =
      check_sizes(kSequenceForward, input, weights, h0, batch_sizes, resets);
  check_shape(
      kSequenceForward,
      {"bias", bias},
      "[3 * state_size]",
      {weights.sym_size(0)});
  for (const auto& arg : NamedTensors{{"h0", h0}, {"c0", c0}}) {
    check_shape(kSequenceForward, arg, kStateNames, {batch, state_size});
  }
}

void check_sequence_backward_devices(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets) {
  check_devices(
      kSequenceBackward,
      {{"input", input},
       {"weights", weights},
       {"h0", h0},
       {"output", output},
       {"cells", cells},
       {"gates", gates},
       {"grad_output", grad_output},
       {"grad_cells", grad_cells}});
  check_optional_devices(kSequenceBackward, input, batch_sizes, resets);
}

void check_sequence_backward(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    const OptionalTensor& resets) {
  check_sequence_backward_devices(
      grad_output,
      grad_cells,
      output,
      cells,
      gates,
      input,
      weights,
      h0,
      batch_sizes,
      resets);
  check_layouts_and_dtypes(
      kSequenceBackward,
      {{"input", input},
       {"weights", weights},
       {"h0", h0},
       {"output", output},
       {"cells", cells},
       {"gates", gates},
       {"grad_output", grad_output},
       {"grad_cells", grad_cells}});
  const auto [batch, state_size] =
      check_sizes(kSequenceBackward, input, weights, h0, batch_sizes, resets);
  check_shape(kSequenceBackward, {"h0", h0}, kStateNames, {batch, state_size});
  const bool packed = batch_sizes.has_value();
  auto sizes = input.sym_sizes().vec();
  sizes.back() = state_size;
  for (const auto& arg : NamedTensors{
           {"output", output},
           {"cells", cells},
           {"grad_output", grad_output},
           {"grad_cells", grad_cells}}) {
    check_shape(
        kSequenceBackward,
        arg,
        names_of_sizes(
            packed,
            "[time, batch, state_size]",
            "[sum(batch_sizes), state_size]"),
        sizes);
  }
  sizes.back() = weights.sym_size(0);
  check_shape(
      kSequenceBackward,
      {"gates", gates},
      names_of_sizes(
          packed,
          "[time, batch, 3 * state_size]",
          "[sum(batch_sizes), 3 * state_size]"),
      sizes);
}

} // namespace lltm
