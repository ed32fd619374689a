#include "cpu/empty_gradients.h"
#include "cpu/gemm.h"
#include "cpu/lltm_forward.h"
#include "cpu/lltm_sequence_backward.h"
#include "cpu/lltm_sequence_forward.h"
#include "cpu/scratch.h"
#include "cpu/sequence_states.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"
#include "ops/sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/record_function.h>
#include <torch/library.h>

namespace lltm {

namespace {

// With weights as they lie, as a loop over the cell.
template <typename scalar_t>
void forward_step_by_step(const SequenceForwardArguments<scalar_t>& a) {
  const auto size = a.state_size;
  const OldStates<scalar_t> h{a.steps, size, a.output, a.h0, a.resets};
  const OldStates<scalar_t> cell{a.steps, size, a.cells, a.c0, a.resets};
  const UnroundedCells<scalar_t> unrounded_cells(a.batch, size, a.c0);
  const Scratch<scalar_t> scratch(2 * a.batch * size);
  for (size_t i = 0; i < a.steps.size(); ++i) {
    const auto [row, rows, carried] = a.steps[i];
    unrounded_cells.reset(h, i, 0, rows, 0, size);
    forward_step<scalar_t>({
        {rows, a.input_features, size},
        a.input + row * a.input_features,
        a.weights,
        a.bias,
        h.rows(i, 0, rows, scratch.data()),
        unrounded_cells.kAny
            ? nullptr
            : cell.rows(i, 0, rows, scratch.data() + a.batch * size),
        a.output + row * size,
        a.cells + row * size,
        a.gates == nullptr ? nullptr : a.gates + row * 3 * size,
        unrounded_cells.before(i, 0),
        unrounded_cells.after(i, 0),
    });
  }
}

template <typename scalar_t>
void forward_all_steps(const SequenceForwardArguments<scalar_t>& arguments) {
  if (arguments.steps.size() < kStepsWorthPacking) {
    RECORD_USER_SCOPE("lltm::sequence_forward_step_by_step");
    return forward_step_by_step(arguments);
  }
  if constexpr (kPair<scalar_t> == 2) {
    const bool whole_pairs =
        arguments.state_size % 2 == 0 && arguments.input_features % 2 == 0;
    if (whole_pairs && has_bfloat16_gemm()) {
      RECORD_USER_SCOPE("lltm::sequence_forward_gemm_bfloat16");
      return SequenceForward<scalar_t, scalar_t>(arguments).run();
    }
  }
  RECORD_USER_SCOPE("lltm::sequence_forward_gemm");
  SequenceForward<scalar_t, at::opmath_type<scalar_t>>(arguments).run();
}

const uint8_t* bytes_or_null(const at::Tensor& resets) {
  return resets.defined() ? static_cast<const uint8_t*>(resets.const_data_ptr())
                          : nullptr;
}

at::Tensor contiguous_or_none(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : at::Tensor();
}

template <bool write_gates>
ForwardWithGatesResult sequence_forward_kernel_impl(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets) {
  check_sequence_forward(input, weights, bias, h0, c0, batch_sizes, resets);
  const auto steps =
      sequence_steps(kSequenceForward, input, h0, batch_sizes, reverse);
  const auto state_size = h0.size(1);
  auto output = empty_rows(input, state_size);
  auto cells = empty_rows(input, state_size);
  at::Tensor gates;
  if constexpr (write_gates) {
    gates = empty_rows(input, 3 * state_size);
  }
  if (output.numel() == 0) {
    return {std::move(output), std::move(cells), std::move(gates)};
  }
  const auto input_ = input.expect_contiguous();
  const auto weights_ = weights.expect_contiguous();
  const auto bias_ = bias.expect_contiguous();
  const auto h0_ = h0.expect_contiguous();
  const auto c0_ = c0.expect_contiguous();
  const auto resets_ = contiguous_or_none(resets);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      input.scalar_type(),
      "lltm_sequence_forward_cpu",
      [&] {
        forward_all_steps<scalar_t>({
            {h0.size(0), input.size(-1), state_size},
            steps,
            batch_sizes.has_value(),
            input_->const_data_ptr<scalar_t>(),
            weights_->const_data_ptr<scalar_t>(),
            bias_->const_data_ptr<scalar_t>(),
            h0_->const_data_ptr<scalar_t>(),
            c0_->const_data_ptr<scalar_t>(),
            bytes_or_null(resets_),
            output.mutable_data_ptr<scalar_t>(),
            cells.mutable_data_ptr<scalar_t>(),
            write_gates ? gates.mutable_data_ptr<scalar_t>() : nullptr,
        });
      });
  return {std::move(output), std::move(cells), std::move(gates)};
}

ForwardResult sequence_forward_kernel(
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& bias,
    const at::Tensor& h0,
    const at::Tensor& c0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets) {
  auto [output, cells, gates] = sequence_forward_kernel_impl<false>(
      input, weights, bias, h0, c0, batch_sizes, reverse, resets);
  return {std::move(output), std::move(cells)};
}

template <typename scalar_t>
void backward_all_steps(const SequenceBackwardArguments<scalar_t>& arguments) {
  if constexpr (kPair<scalar_t> == 2) {
    if (has_bfloat16_gemm()) {
      RECORD_USER_SCOPE("lltm::sequence_backward_gemm_bfloat16");
      return SequenceBackward<scalar_t, scalar_t>(arguments).run();
    }
  }
  RECORD_USER_SCOPE("lltm::sequence_backward_gemm");
  SequenceBackward<scalar_t, at::opmath_type<scalar_t>>(arguments).run();
}

BackwardResult sequence_backward_kernel(
    const at::Tensor& grad_output,
    const at::Tensor& grad_cells,
    const at::Tensor& output,
    const at::Tensor& cells,
    const at::Tensor& gates,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool reverse,
    const OptionalTensor& resets,
    OutputMask output_mask) {
  check_sequence_backward(
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
  const auto steps =
      sequence_steps(kSequenceBackward, input, h0, batch_sizes, reverse);
  const auto state_size = h0.size(1);
  auto result = empty_gradients(output, input, weights, h0, output_mask);
  if (output.numel() == 0) {
    return result;
  }
  auto& [d_input, d_weights, d_bias, d_h0, d_c0] = result;
  const auto grad_output_ = grad_output.expect_contiguous();
  const auto grad_cells_ = grad_cells.expect_contiguous();
  const auto output_ = output.expect_contiguous();
  const auto cells_ = cells.expect_contiguous();
  const auto gates_ = gates.expect_contiguous();
  const auto input_ = input.expect_contiguous();
  const auto weights_ = weights.expect_contiguous();
  const auto h0_ = h0.expect_contiguous();
  const auto resets_ = contiguous_or_none(resets);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      input.scalar_type(),
      "lltm_sequence_backward_cpu",
      [&] {
        backward_all_steps<scalar_t>({
            {h0.size(0), input.size(-1), state_size},
            steps,
            batch_sizes.has_value(),
            grad_output_->const_data_ptr<scalar_t>(),
            grad_cells_->const_data_ptr<scalar_t>(),
            output_->const_data_ptr<scalar_t>(),
            cells_->const_data_ptr<scalar_t>(),
            gates_->const_data_ptr<scalar_t>(),
            input_->const_data_ptr<scalar_t>(),
            weights_->const_data_ptr<scalar_t>(),
            h0_->const_data_ptr<scalar_t>(),
            bytes_or_null(resets_),
            pointer_or_null<scalar_t>(d_input),
            pointer_or_null<scalar_t>(d_weights),
            pointer_or_null<scalar_t>(d_bias),
            pointer_or_null<scalar_t>(d_h0),
            pointer_or_null<scalar_t>(d_c0),
        });
      });
  return result;
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("sequence_forward", TORCH_FN(sequence_forward_kernel));
  m.impl(
      "_sequence_forward_with_gates",
      TORCH_FN(sequence_forward_kernel_impl<true>));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_kernel));
}

} // namespace lltm
