#include "cpu/lltm_empty_gradients.h"
#include "cpu/lltm_sequence_backward.h"
#include "cpu/lltm_sequence_states.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <torch/library.h>

namespace lltm {

namespace {

BackwardResult sequence_backward_kernel(const SequenceBackwardArguments& a) {
  check_arguments(a);
  const auto steps = sequence_steps(a);
  const auto state_size = a.h0.size(1);
  auto result =
      empty_gradients(a.output, a.input, a.weights, a.h0, a.output_mask);
  if (a.output.numel() == 0) {
    return result;
  }
  auto& [d_input, d_weights, d_bias, d_h0, d_c0] = result;
  const auto grad_output_ = a.grad_output.expect_contiguous();
  const auto grad_cells_ = a.grad_cells.expect_contiguous();
  const auto output_ = a.output.expect_contiguous();
  const auto cells_ = a.cells.expect_contiguous();
  const auto gates_ = a.gates.expect_contiguous();
  const auto input_ = a.input.expect_contiguous();
  const auto weights_ = a.weights.expect_contiguous();
  const auto h0_ = a.h0.expect_contiguous();
  const auto resets_ = a.resets ? a.resets->contiguous() : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_sequence_backward_cpu",
      [&] {
        sequence_backward_steps<scalar_t>({
            {a.h0.size(0), a.input.size(-1), state_size},
            steps,
            a.batch_sizes.has_value(),
            grad_output_->const_data_ptr<scalar_t>(),
            grad_cells_->const_data_ptr<scalar_t>(),
            output_->const_data_ptr<scalar_t>(),
            cells_->const_data_ptr<scalar_t>(),
            gates_->const_data_ptr<scalar_t>(),
            input_->const_data_ptr<scalar_t>(),
            weights_->const_data_ptr<scalar_t>(),
            h0_->const_data_ptr<scalar_t>(),
            bytes_of(resets_).data,
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
  m.impl("sequence_backward", as_kernel<sequence_backward_kernel>());
}

} // namespace lltm
