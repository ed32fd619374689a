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

at::Tensor contiguous_or_zeros(
    const OptionalTensor& gradient,
    const at::Tensor& like) {
  return (gradient ? *gradient : at::zeros_like(like)).contiguous();
}

at::Tensor contiguous_or_none(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : at::Tensor();
}

template <typename scalar_t>
const scalar_t* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<scalar_t>() : nullptr;
}

void copy_if_wanted(const OptionalTensor& gradient, const at::Tensor& result) {
  if (gradient && result.defined()) {
    result.copy_(*gradient);
  }
}

BackwardResult backward_kernel_impl(
    const SequenceBackwardArguments& a,
    const std::vector<SequenceStep>& steps) {
  const auto result =
      empty_gradients(a.output, a.input, a.weights, a.h0, a.output_mask);
  if (a.output.numel() == 0) {
    // No step runs, so the last state is the first.
    copy_if_wanted(a.grad_h_n, std::get<3>(result));
    copy_if_wanted(a.grad_c_n, std::get<4>(result));
    return result;
  }
  const auto grad_output = contiguous_or_zeros(a.grad_output, a.output);
  const auto grad_cells = contiguous_or_zeros(a.grad_cells, a.cells);
  const auto grad_h_n = contiguous_or_none(a.grad_h_n);
  const auto grad_c_n = contiguous_or_none(a.grad_c_n);
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
  const auto resets = contiguous_or_none(a.resets);
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
            .grad_output = grad_output.const_data_ptr<scalar_t>(),
            .grad_cells = grad_cells.const_data_ptr<scalar_t>(),
            .grad_h_n = data_or_null<scalar_t>(grad_h_n),
            .grad_c_n = data_or_null<scalar_t>(grad_c_n),
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
