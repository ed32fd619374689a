#include "cpu/lltm_sequence_forward_steps.h"

#include "cpu/lltm_forward.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/profiled_path.h"
#include "cpu/primitives/scratch.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <type_traits>

// lltm::sequence_forward on the CPU: a loop over the cell for few steps, else
// the steps of lltm_sequence_forward_steps.h.
namespace lltm {

namespace {

// With fewer steps, packing the weights saves time only at few sizes. Measured
// on Zen 5.
constexpr size_t kStepsWorthPacking = 8;
// With one or two rows of the batch, and weights of which L2 keeps a third at
// most, packing saves time only from many more steps on: weights that lie as
// they are come from L3 almost as fast. Without packing, 8x2x2048x2048 takes
// half the time on the Xeon. Called only for kStepsWorthPacking steps and more.
constexpr size_t kMostStepsUnpacked = 64;
bool is_packing_faster(int64_t batch, size_t steps, int64_t weight_bytes) {
  return batch > 2 || steps > kMostStepsUnpacked ||
      weight_bytes <= 3 * l2_bytes();
}

// With weights as they lie, as a loop over the cell.
template <typename scalar_t>
void forward_step_by_step(const SequenceForwardPointers<scalar_t>& a) {
  const InOpmath<scalar_t> bias(a.bias, 3 * a.sizes.state_size);
  const Scratch<scalar_t> scratch(a.sizes.batch * a.sizes.state_size);
  for (size_t i = 0; i < a.steps.size(); ++i) {
    const auto [row, rows, carried] = a.steps[i];
    forward_step<scalar_t>(
        {.sizes = {rows, a.sizes.input_features, a.sizes.state_size},
         .input = a.input + row * a.sizes.input_features,
         .weights = a.weights,
         .old_h = a.old_h.template rows<scalar_t>(i, 0, rows, scratch.data()),
         .pointers = a.cell_pointers(
             i, Part(rows, 0, 1), 0, a.sizes.state_size, bias.data())});
  }
}

template <typename scalar_t>
void sequence_forward_steps(const SequenceForwardPointers<scalar_t>& a) {
  using opmath_t = at::opmath_type<scalar_t>;
  if (a.steps.size() < kStepsWorthPacking) {
    return forward_step_by_step(a);
  }
  if constexpr (kPair<scalar_t> == 2) {
    if (a.sizes.has_whole_pairs() && has_bfloat16_gemm()) {
      const ProfiledPath path("lltm::sequence_forward_gemm_bfloat16");
      return SequenceForward<scalar_t, scalar_t>(a, true).run();
    }
  }
  const auto weight_bytes =
      3 * a.sizes.state_size * a.sizes.state_size * int64_t(sizeof(opmath_t));
  const bool packs = !std::is_same_v<scalar_t, opmath_t> ||
      is_packing_faster(a.sizes.batch, a.steps.size(), weight_bytes);
  const ProfiledPath path("lltm::sequence_forward_gemm");
  SequenceForward<scalar_t, opmath_t>(a, packs).run();
}

template <bool write_gates>
ForwardWithGatesResult sequence_forward_kernel_impl(
    const SequenceForwardArguments& a) {
  check_arguments(a);
  const auto steps = sequence_steps(a);
  const auto state_size = a.h0.size(1);
  auto output = empty_rows(a.input, state_size);
  auto cells = empty_rows(a.input, state_size);
  at::Tensor gates;
  if constexpr (write_gates) {
    gates = empty_rows(a.input, 3 * state_size);
  }
  if (output.numel() == 0) {
    return {std::move(output), std::move(cells), std::move(gates)};
  }
  const auto input = a.input.expect_contiguous();
  const auto weights = a.weights.expect_contiguous();
  const auto bias = a.bias.expect_contiguous();
  const auto h0 = a.h0.expect_contiguous();
  const auto c0 = a.c0.expect_contiguous();
  const auto reset_rows = a.resets ? a.resets->contiguous() : at::Tensor();
  const Resets resets = bytes_of(reset_rows);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_sequence_forward_cpu",
      [&] {
        const auto batch = a.h0.size(0);
        sequence_forward_steps<scalar_t>({
            .sizes = {batch, a.input.size(-1), state_size},
            .steps = steps,
            .packed = a.batch_sizes.has_value(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .bias = bias->const_data_ptr<scalar_t>(),
            .old_h =
                {.steps = steps,
                 .state_size = state_size,
                 .h = output.const_data_ptr<scalar_t>(),
                 .h0 = h0->const_data_ptr<scalar_t>(),
                 .resets = resets},
            .cell_states =
                {steps,
                 batch,
                 state_size,
                 c0->const_data_ptr<scalar_t>(),
                 resets},
            .output = output.mutable_data_ptr<scalar_t>(),
            .cells = cells.mutable_data_ptr<scalar_t>(),
            .gates = write_gates ? gates.mutable_data_ptr<scalar_t>() : nullptr,
        });
      });
  return {std::move(output), std::move(cells), std::move(gates)};
}

ForwardResult sequence_forward_kernel(
    const SequenceForwardArguments& arguments) {
  return without_gates(sequence_forward_kernel_impl<false>(arguments));
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("sequence_forward", as_kernel<sequence_forward_kernel>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<sequence_forward_kernel_impl<true>>());
}

} // namespace lltm
