#include "cuda/lltm_pointwise.cuh"
#include "ops/lltm_linear.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"
#include "ops/lltm_sequence_composite.h"
#include "ops/sequence_steps.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <array>

// One GEMM for the products with input of many steps; then each step adds those
// with old_h, by one GEMM, and computes its gates in one kernel.
namespace lltm {

namespace {

at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.flatten(0, -2);
}

// A column of the rows of a step.
at::Tensor resets_of_step(const at::Tensor& resets, const SequenceStep& step) {
  return of_step(resets, step).unsqueeze(1);
}

// Rows [begin, begin + count) of a step, all of which go on from the step
// before, or all of which begin.
struct Group {
  int64_t begin;
  int64_t count;
  at::Tensor old_h;
  at::Tensor old_cell;
};

class SequenceForward {
 public:
  SequenceForward(
      const at::Tensor& weights,
      const at::Tensor& h0,
      const at::Tensor& c0,
      const at::Tensor& resets,
      const at::Tensor& output,
      const at::Tensor& cells)
      : weights_for_h_(weights.narrow(1, 0, h0.size(1)).t()),
        h0_(h0),
        c0_(c0.contiguous()),
        resets_(resets),
        output_(as_rows(output)),
        cells_(as_rows(cells)) {}

  // gates: of the step, their products with input.
  template <bool write_gates>
  void run(
      const SequenceStep& step,
      const SequenceStep* before,
      const at::Tensor& gates) const {
    for (auto& group : groups(step, before)) {
      if (group.count == 0) {
        continue;
      }
      if (resets_.defined()) {
        const auto reset =
            resets_of_step(resets_, step).narrow(0, group.begin, group.count);
        group.old_h = group.old_h.masked_fill(reset, 0);
        group.old_cell = group.old_cell.masked_fill(reset, 0);
      }
      auto gates_of_group = gates.narrow(0, group.begin, group.count);
      gates_of_group.addmm_(group.old_h, weights_for_h_);
      const auto row = step.first_row + group.begin;
      launch_forward<write_gates>(
          gates_of_group,
          group.old_cell,
          output_.narrow(0, row, group.count),
          cells_.narrow(0, row, group.count));
    }
  }

 private:
  std::array<Group, 2> groups(
      const SequenceStep& step,
      const SequenceStep* before) const {
    const auto begun = step.rows - step.carried;
    Group carried{0, step.carried, {}, {}};
    if (before != nullptr) {
      carried.old_h = output_.narrow(0, before->first_row, step.carried);
      carried.old_cell = cells_.narrow(0, before->first_row, step.carried);
    }
    return {
        carried,
        Group{
            step.carried,
            begun,
            h0_.narrow(0, step.carried, begun),
            c0_.narrow(0, step.carried, begun)}};
  }

  const at::Tensor weights_for_h_;
  const at::Tensor h0_;
  const at::Tensor c0_;
  const at::Tensor resets_;
  const at::Tensor output_;
  const at::Tensor cells_;
};

at::Tensor flat_or_none(const OptionalTensor& tensor) {
  return tensor ? tensor->flatten() : at::Tensor();
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
  const c10::cuda::CUDAGuard device_guard(input.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
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
  const SequenceForward forward(
      weights, h0, c0, flat_or_none(resets), output, cells);
  const auto input_rows = as_rows(input);
  const auto weights_for_input =
      weights.narrow(1, state_size, input.size(-1)).t();
  // Where gates are not wanted, the memory for them does not grow with time.
  constexpr int64_t kBytes = 64 << 20;
  const auto most =
      kBytes / (3 * state_size * static_cast<int64_t>(input.element_size()));
  const auto chunks =
      sequence_chunks(steps, write_gates ? input_rows.size(0) : most);
  const auto buffer = write_gates
      ? as_rows(gates)
      : at::empty({most_rows(chunks), 3 * state_size}, input.options());
  for (const auto& chunk : chunks) {
    auto products = buffer.narrow(0, 0, chunk.rows);
    at::addmm_out(
        products,
        bias,
        input_rows.narrow(0, chunk.first_row, chunk.rows),
        weights_for_input);
    for (auto i = chunk.begin; i < chunk.end; ++i) {
      const auto row = steps[i].first_row - chunk.first_row;
      forward.run<write_gates>(
          steps[i],
          i == 0 ? nullptr : &steps[i - 1],
          products.narrow(0, row, steps[i].rows));
    }
  }
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
  const c10::cuda::CUDAGuard device_guard(input.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto steps =
      sequence_steps(kSequenceBackward, input, h0, batch_sizes, reverse);
  const auto state_size = h0.size(1);
  const auto rows = [](const at::Tensor& tensor) {
    return as_rows(tensor.contiguous());
  };
  const auto grad_output_rows = rows(grad_output);
  const auto grad_cell_rows = rows(grad_cells);
  const auto cell_rows = rows(cells);
  const auto gate_rows = rows(gates);
  const auto input_rows = rows(input);
  const auto reset_rows = flat_or_none(resets);
  const auto weights_for_h = weights.narrow(1, 0, state_size);
  const auto d_gates =
      at::empty({gate_rows.size(0), 3 * state_size}, input.options());
  const auto d_h = at::zeros(h0.sizes(), input.options());
  const auto d_cell = at::zeros(
      h0.sizes(), input.options().dtype(at::toOpMathType(input.scalar_type())));
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (state_size == 0) {
      break;
    }
    const auto d_gates_of_step = of_step(d_gates, *step);
    launch_backward<true>(
        of_step(grad_output_rows, *step),
        of_step(grad_cell_rows, *step),
        of_step(cell_rows, *step),
        of_step(gate_rows, *step),
        d_h,
        d_gates_of_step,
        d_cell);
    auto d_h_of_step = d_h.narrow(0, 0, step->rows);
    at::mm_out(d_h_of_step, d_gates_of_step, weights_for_h);
    if (reset_rows.defined()) {
      const auto reset = resets_of_step(reset_rows, *step);
      d_h_of_step.masked_fill_(reset, 0);
      d_cell.narrow(0, 0, step->rows).masked_fill_(reset, 0);
    }
  }
  at::Tensor old_h;
  if (output_mask[1]) {
    old_h = composite::old_states(
        steps,
        rows(output),
        h0,
        reverse,
        reset_rows.defined() ? OptionalTensor(reset_rows) : OptionalTensor());
  }
  auto [d_input, d_weights, d_bias, none, nothing] = linear_gates_backward(
      d_gates,
      {},
      input_rows,
      weights,
      output_mask[1] ? old_h : h0,
      {output_mask[0], output_mask[1], output_mask[2], false, false});
  return {
      output_mask[0] ? d_input.view(input.sizes()) : at::Tensor(),
      d_weights,
      d_bias,
      output_mask[3] ? d_h : at::Tensor(),
      output_mask[4] ? d_cell.to(input.scalar_type()) : at::Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CUDA, m) {
  m.impl("sequence_forward", TORCH_FN(sequence_forward_kernel));
  m.impl(
      "_sequence_forward_with_gates",
      TORCH_FN(sequence_forward_kernel_impl<true>));
  m.impl("sequence_backward", TORCH_FN(sequence_backward_kernel));
}

} // namespace lltm
