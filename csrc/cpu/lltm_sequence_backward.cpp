#include "cpu/lltm_sequence_backward_steps.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <vector>

// lltm::backward and lltm::sequence_backward on the CPU.
namespace lltm {

namespace {

BackwardResult backward_kernel_impl(
    const SequenceBackwardArguments& a,
    const std::vector<SequenceStep>& steps) {
  const auto result =
      empty_gradients(a.output, a.input, a.weights, a.h0, a.output_mask);
  if (a.output.numel() == 0) {
    return result;
  }
  const auto grad_output = a.grad_output.expect_contiguous();
  const auto grad_cells =
      (a.grad_cells ? *a.grad_cells : at::zeros_like(a.cells)).contiguous();
  const auto output = a.output.expect_contiguous();
  const auto cells = a.cells.expect_contiguous();
  const auto gates = a.gates.expect_contiguous();
  const auto input = a.input.expect_contiguous();
  // Autograd passes weights without values if one step does not need them.
  const bool needs_weights =
      a.output_mask[0] || a.output_mask[3] || steps.size() > 1 || a.resets;
  const auto weights = needs_weights
      ? a.weights.expect_contiguous()
      : c10::MaybeOwned<at::Tensor>::borrowed(a.weights);
  const auto h0 = a.h0.expect_contiguous();
  const auto resets = a.resets ? a.resets->contiguous() : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_backward_cpu",
      [&] {
        backward_steps<scalar_t>({
            .sizes = {a.h0.size(0), a.input.size(-1), a.h0.size(1)},
            .math = CellMath<at::opmath_type<scalar_t>>(a),
            .gradients = pointers_to<scalar_t>(result),
            .steps = steps,
            .has_batch_sizes = a.batch_sizes.has_value(),
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

BackwardResult backward_kernel(const BackwardArguments& a) {
  check_arguments(a);
  return backward_kernel_impl(
      as_sequence(a),
      {{.first_row = 0, .rows = a.input.size(0), .carried = 0}});
}

BackwardResult sequence_backward_kernel(const SequenceBackwardArguments& a) {
  check_arguments(a);
  return backward_kernel_impl(a, sequence_steps(a));
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("backward", as_kernel<backward_kernel>());
  m.impl("sequence_backward", as_kernel<sequence_backward_kernel>());
}

} // namespace lltm
