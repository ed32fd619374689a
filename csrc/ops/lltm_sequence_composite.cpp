#include "ops/lltm_sequence_composite.h"

#include "ops/dispatch.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <vector>

namespace lltm {

namespace {

OptionalTensor flat(const OptionalTensor& resets) {
  return resets ? resets->reshape_symint({resets->sym_numel()}) : resets;
}

// The first rows of a state, which a step begins with, but zeros where it is
// reset: no state passes a reset, and no gradient.
at::Tensor begun(
    const at::Tensor& state,
    const SequenceStep& step,
    const OptionalTensor& resets) {
  const auto rows = step.rows == state.size(0)
      ? state // narrow() would have a derivative
      : state.narrow(0, 0, step.rows);
  return resets ? rows.masked_fill(of_step(*resets, step).unsqueeze(1), 0)
                : rows;
}

// The rows of a step, then the rest of the batch as it was.
at::Tensor with_kept(const at::Tensor& rows, const at::Tensor& before) {
  const auto rest = before.size(0) - rows.size(0);
  return rest == 0 ? rows
                   : at::cat({rows, before.narrow(0, rows.size(0), rest)}, 0);
}

} // namespace

SequenceForwardResult composite_forward(const SequenceForwardArguments& a) {
  const auto steps = sequence_steps(a);
  const auto time = [&](size_t i) {
    return a.reverse ? steps.size() - 1 - i : i;
  };
  std::vector<c10::SymInt> rows(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    rows[time(i)] = steps[i].rows;
  }
  // By one operator, whose derivative is one, too.
  const auto inputs = as_rows(a.input).split_with_sizes_symint(rows);
  const auto resets = flat(a.resets);
  const auto weights = to_opmath(a.weights);
  const auto bias = to_opmath(a.bias);
  std::vector<at::Tensor> outputs(steps.size()), cells(steps.size());
  auto h = a.h0;
  // Not rounded between steps: that would lose what is added to a state that
  // has grown.
  auto cell = to_opmath(a.c0);
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto [new_h, new_cell] = composite_step(
        {.input = inputs[time(i)],
         .weights = weights,
         .bias = bias,
         .old_h = begun(h, steps[i], resets),
         .old_cell = begun(cell, steps[i], resets)});
    h = with_kept(new_h, h);
    cell = with_kept(new_cell, cell);
    outputs[time(i)] = new_h;
    cells[time(i)] = new_cell.to(a.c0.scalar_type());
  }
  auto sizes = a.input.sym_sizes().vec();
  sizes.back() = a.h0.sym_size(1);
  return {
      at::cat(outputs).view_symint(sizes),
      at::cat(cells).view_symint(sizes),
      h,
      cell.to(a.c0.scalar_type())};
}

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  m.impl("sequence_forward", as_kernel<composite_kernel<sequence_forward>>());
}

} // namespace lltm
