#include "ops/lltm_sequence_composite.h"

#include "ops/dispatch.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
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

// Zeros in the rows that the step resets: no state passes a reset, and no
// gradient.
at::Tensor reset(
    const at::Tensor& state,
    const SequenceStep& step,
    const OptionalTensor& resets) {
  return resets ? state.masked_fill(of_step(*resets, step).unsqueeze(1), 0)
                : state;
}

at::Tensor or_zeros(const OptionalTensor& gradient, const at::Tensor& like) {
  return gradient ? *gradient : at::zeros_like(like);
}

// The rows of a step, then the rest of the batch as it was.
at::Tensor with_kept(const at::Tensor& rows, const at::Tensor& before) {
  const auto rest = before.size(0) - rows.size(0);
  return rest == 0 ? rows
                   : at::cat({rows, before.narrow(0, rows.size(0), rest)}, 0);
}

} // namespace

// Few operators for many steps: on a GPU each is a launch.
at::Tensor old_states(
    const std::vector<SequenceStep>& steps,
    const at::Tensor& states,
    const at::Tensor& initial,
    bool reverse,
    const OptionalTensor& resets) {
  std::vector<at::Tensor> states_and_initial;
  for (size_t t = 0; t < steps.size(); ++t) {
    const auto i = reverse ? steps.size() - 1 - t : t;
    const auto& [first_row, rows, carried] = steps[i];
    if (carried > 0) {
      states_and_initial.push_back(
          states.narrow(0, steps[i - 1].first_row, carried));
    }
    states_and_initial.push_back(initial.narrow(0, carried, rows - carried));
  }
  const auto all = at::cat(states_and_initial, 0);
  return resets ? all.masked_fill(resets->unsqueeze(1), 0) : all;
}

SequenceForwardWithGatesResult composite_forward(
    const SequenceForwardArguments& a) {
  const auto steps = sequence_steps(a);
  const auto input_rows = as_rows(a.input);
  const auto reset_rows = flat(a.resets);
  std::vector<at::Tensor> outputs, cells, gates;
  const auto opmath_weights = to_opmath(a.weights);
  const auto opmath_bias = to_opmath(a.bias);
  auto h = a.h0;
  // Not rounded between steps: that would lose what is added to a state that
  // has grown.
  auto cell = to_opmath(a.c0);
  for (const auto& step : steps) {
    const auto [new_h, new_cell, activated] = composite_step(
        step_arguments<ForwardArguments>(
            a,
            of_step(input_rows, step),
            opmath_weights,
            opmath_bias,
            reset(h.narrow(0, 0, step.rows), step, reset_rows),
            reset(cell.narrow(0, 0, step.rows), step, reset_rows)));
    h = with_kept(new_h, h);
    cell = with_kept(new_cell, cell);
    outputs.push_back(new_h);
    cells.push_back(new_cell.to(a.c0.scalar_type()));
    gates.push_back(activated);
  }
  const auto joined = [&](std::vector<at::Tensor>& of_steps) {
    return like_input(
        in_order_of_time(std::move(of_steps), a.reverse), a.input);
  };
  return {
      joined(outputs),
      joined(cells),
      h,
      cell.to(a.c0.scalar_type()),
      joined(gates)};
}

BackwardResult composite_backward(
    const SequenceBackwardArguments& a,
    const at::Tensor& grad_gates) {
  const auto steps = sequence_steps(a);
  const auto grad_h_rows = as_rows(or_zeros(a.grad_output, a.output));
  const auto grad_cell_rows = as_rows(or_zeros(a.grad_cells, a.cells));
  const auto cell_rows = as_rows(a.cells);
  const auto gate_rows = as_rows(a.gates);
  const auto grad_gate_rows =
      grad_gates.defined() ? as_rows(grad_gates) : grad_gates;
  const auto input_rows = as_rows(a.input);
  const auto reset_rows = flat(a.resets);
  const auto old_h =
      old_states(steps, as_rows(a.output), a.h0, a.reverse, reset_rows);
  // Not rounded between steps.
  const auto opmath_weights = to_opmath(a.weights);
  auto d_h = to_opmath(or_zeros(a.grad_h_n, a.h0));
  auto d_cell = to_opmath(or_zeros(a.grad_c_n, a.h0));
  std::vector<at::Tensor> d_gates;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const auto input = to_opmath(of_step(input_rows, *step));
    const auto old_h_of_step = of_step(old_h, *step);
    auto [d_gates_of_step, d_cell_of_step] = composite_gate_gradients(
        step_arguments<BackwardArguments>(
            a,
            of_step(grad_h_rows, *step) + d_h.narrow(0, 0, step->rows),
            of_step(grad_cell_rows, *step) + d_cell.narrow(0, 0, step->rows),
            of_step(cell_rows, *step),
            of_step(gate_rows, *step),
            input,
            opmath_weights,
            old_h_of_step),
        grad_gate_rows.defined() ? of_step(grad_gate_rows, *step)
                                 : grad_gate_rows);
    const auto d_h_of_step = std::get<3>(pre_activations_backward(
        d_gates_of_step,
        {},
        input,
        opmath_weights,
        old_h_of_step,
        {false, false, false, true, false}));
    d_h = with_kept(reset(d_h_of_step, *step, reset_rows), d_h);
    d_cell = with_kept(reset(d_cell_of_step, *step, reset_rows), d_cell);
    d_gates.push_back(std::move(d_gates_of_step));
  }
  auto [d_input, d_weights, d_bias, none, nothing] = pre_activations_backward(
      in_order_of_time(std::move(d_gates), !a.reverse),
      {},
      input_rows,
      a.weights,
      old_h,
      {a.output_mask[0], a.output_mask[1], a.output_mask[2], false, false});
  const auto dtype = a.h0.scalar_type();
  return {
      a.output_mask[0] ? like_input(d_input, a.input) : at::Tensor(),
      d_weights,
      d_bias,
      a.output_mask[3] ? d_h.to(dtype) : at::Tensor(),
      a.output_mask[4] ? d_cell.to(dtype) : at::Tensor()};
}

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  m.impl("sequence_forward", as_kernel<composite_kernel<sequence_forward>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<composite_kernel<_sequence_forward_with_gates>>());
  m.impl("sequence_backward", as_kernel<composite_kernel<sequence_backward>>());
}

} // namespace lltm
