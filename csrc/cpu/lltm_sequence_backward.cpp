#include "cpu/lltm_sequence_backward_steps.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <torch/library.h>

// lltm::backward and lltm::sequence_backward on the CPU.
namespace lltm {

namespace {

BackwardResult backward_kernel(const BackwardArguments& a) {
  check_arguments(a);
  const auto result =
      empty_gradients(a.new_cell, a.input, a.weights, a.old_h, a.output_mask);
  if (a.new_cell.numel() == 0) {
    return result;
  }
  const auto grad_h = a.grad_h.expect_contiguous();
  const auto grad_cell = a.grad_cell.expect_contiguous();
  const auto new_cell = a.new_cell.expect_contiguous();
  const auto gates = a.gates.expect_contiguous();
  const auto input = a.input.expect_contiguous();
  // Autograd passes weights without values if they are not needed.
  const bool needs_weights = a.output_mask[0] || a.output_mask[3];
  const auto weights = needs_weights
      ? a.weights.expect_contiguous()
      : c10::MaybeOwned<at::Tensor>::borrowed(a.weights);
  const auto old_h = a.old_h.expect_contiguous();
  const auto batch = a.input.size(0);
  const std::vector<SequenceStep> steps{
      {.first_row = 0, .rows = batch, .carried = 0}};
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_backward_cpu",
      [&] {
        backward_steps<scalar_t>({
            .sizes = {batch, a.input.size(1), a.old_h.size(1)},
            .gradients = pointers_to<scalar_t>(result),
            .steps = steps,
            .packed = false,
            .grad_output = grad_h->const_data_ptr<scalar_t>(),
            .grad_cells = grad_cell->const_data_ptr<scalar_t>(),
            .output = nullptr, // of the steps before: there is none
            .cells = new_cell->const_data_ptr<scalar_t>(),
            .gates = gates->const_data_ptr<scalar_t>(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .h0 = old_h->const_data_ptr<scalar_t>(),
            .resets = {nullptr},
        });
      });
  return result;
}

BackwardResult sequence_backward_kernel(const SequenceBackwardArguments& a) {
  check_arguments(a);
  const auto steps = sequence_steps(a);
  const auto result =
      empty_gradients(a.output, a.input, a.weights, a.h0, a.output_mask);
  if (a.output.numel() == 0) {
    return result;
  }
  const auto grad_output = a.grad_output.expect_contiguous();
  const auto grad_cells = a.grad_cells_or_zeros().contiguous();
  const auto output = a.output.expect_contiguous();
  const auto cells = a.cells.expect_contiguous();
  const auto gates = a.gates.expect_contiguous();
  const auto input = a.input.expect_contiguous();
  const auto weights = a.weights.expect_contiguous();
  const auto h0 = a.h0.expect_contiguous();
  const auto resets = a.resets ? a.resets->contiguous() : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_sequence_backward_cpu",
      [&] {
        backward_steps<scalar_t>({
            .sizes = {a.h0.size(0), a.input.size(-1), a.h0.size(1)},
            .gradients = pointers_to<scalar_t>(result),
            .steps = steps,
            .packed = a.batch_sizes.has_value(),
            .grad_output = grad_output->const_data_ptr<scalar_t>(),
            .grad_cells = grad_cells.const_data_ptr<scalar_t>(),
            .output = output->const_data_ptr<scalar_t>(),
            .cells = cells->const_data_ptr<scalar_t>(),
            .gates = gates->const_data_ptr<scalar_t>(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .h0 = h0->const_data_ptr<scalar_t>(),
            .resets = bytes_of(resets),
        });
      });
  return result;
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("backward", as_kernel<backward_kernel>());
  m.impl("sequence_backward", as_kernel<sequence_backward_kernel>());
}

} // namespace lltm
