#include "ops/lltm_sequence_composite.h"

#include "ops/dispatch.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <torch/library.h>

#include <algorithm>

namespace lltm {

namespace {

// A row for each row of input: [rows, columns]. Gradcheck's vmap has no rule
// for flatten.
at::Tensor as_rows(const at::Tensor& t) {
  return t.dim() == 2
      ? t
      : t.reshape_symint({t.sym_size(0) * t.sym_size(1), t.sym_size(2)});
}

OptionalTensor flat(const OptionalTensor& resets) {
  return resets ? resets->reshape_symint({resets->sym_numel()}) : resets;
}

// Rows, with the sizes of input but the last.
at::Tensor like_input(const at::Tensor& rows, const at::Tensor& input) {
  auto sizes = input.sym_sizes().vec();
  sizes.back() = rows.sym_size(1);
  return rows.view_symint(sizes);
}

// Joins the tensors of all steps. They stand in the order of time, or in the
// opposite order if reverse.
at::Tensor in_order_of_time(std::vector<at::Tensor> tensors, bool reverse) {
  if (reverse) {
    std::reverse(tensors.begin(), tensors.end());
  }
  return at::cat(tensors, 0);
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
  // The rows of each step, by one operator whose derivative is one, too.
  std::vector<c10::SymInt> rows;
  for (const auto& step : steps) {
    rows.emplace_back(step.rows);
  }
  if (a.reverse) {
    std::reverse(rows.begin(), rows.end());
  }
  auto inputs = as_rows(a.input).split_with_sizes_symint(rows);
  if (a.reverse) {
    std::reverse(inputs.begin(), inputs.end());
  }
  const auto resets = flat(a.resets);
  const auto weights = to_opmath(a.weights);
  const auto bias = to_opmath(a.bias);
  std::vector<at::Tensor> outputs, cells;
  auto h = a.h0;
  // Not rounded between steps: that would lose what is added to a state that
  // has grown.
  auto cell = to_opmath(a.c0);
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto [new_h, new_cell] = composite_step(
        {.input = inputs[i],
         .weights = weights,
         .bias = bias,
         .old_h = begun(h, steps[i], resets),
         .old_cell = begun(cell, steps[i], resets)});
    h = with_kept(new_h, h);
    cell = with_kept(new_cell, cell);
    outputs.push_back(new_h);
    cells.push_back(new_cell.to(a.c0.scalar_type()));
  }
  const auto joined = [&](std::vector<at::Tensor>& of_steps) {
    return like_input(
        in_order_of_time(std::move(of_steps), a.reverse), a.input);
  };
  return {joined(outputs), joined(cells), h, cell.to(a.c0.scalar_type())};
}

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  m.impl("sequence_forward", as_kernel<composite_kernel<sequence_forward>>());
}

} // namespace lltm
