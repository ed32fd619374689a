#pragma once

#include "cuda/lltm_sequence_recurrence.h"
#include "ops/lltm_composite.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <tuple>

namespace lltm {

// Null if rows are undefined.
template <typename scalar_t>
const scalar_t* const_rows(const at::Tensor& rows, const SequenceStep& step) {
  return rows.defined()
      ? rows.const_data_ptr<scalar_t>() + step.first_row * rows.size(1)
      : nullptr;
}

template <SequenceDevice Device>
class BackwardSteps {
 public:
  BackwardSteps(
      const SequenceBackwardArguments& a,
      const std::vector<SequenceStep>& steps,
      const at::Tensor& d_preactivations)
      : a_(a),
        steps_(steps),
        grad_output_((a.grad_output ? as_rows(*a.grad_output)
                                    : at::zeros_like(as_rows(a.output)))
                         .contiguous()),
        grad_cells_(
            a.grad_cells ? as_rows(*a.grad_cells).contiguous() : at::Tensor()),
        grad_h_n_(a.grad_h_n ? a.grad_h_n->contiguous() : at::Tensor()),
        grad_c_n_(a.grad_c_n ? a.grad_c_n->contiguous() : at::Tensor()),
        cells_(as_rows(a.cells).contiguous()),
        gates_(as_rows(a.gates).contiguous()),
        weights_for_h_(a.weights.narrow(1, 0, a.h0.size(1))),
        resets_(flat_or_none(a.resets)),
        d_preactivations_(d_preactivations),
        state_sizes_(a.h0.sizes()),
        sequence_(recurrence_sequence<Device>(a, steps)) {}

  // d_h0 and d_c0, of the dtype of gates. Writes d_preactivations.
  std::tuple<at::Tensor, at::Tensor> run() const {
    if (sequence_) {
      auto d_h0 = at::empty(state_sizes_, gates_.options());
      auto d_c0 = at::empty(state_sizes_, gates_.options());
      if (run_recurrence(d_h0, d_c0)) {
        return {std::move(d_h0), std::move(d_c0)};
      }
    }
    return run_steps();
  }

 private:
  bool run_recurrence(const at::Tensor& d_h0, const at::Tensor& d_c0) const {
    Device::fill_sentinel(d_preactivations_);
    return AT_DISPATCH_REDUCED_FLOATING_TYPES(
        gates_.scalar_type(), "lltm_backward", [&] {
          recurrence::Backward<scalar_t> args{};
          set_common(args, a_, *sequence_, weights_for_h_, resets_);
          args.last =
              cursor_of(steps_, sequence_->steps - 1, sequence_->reverse);
          args.gates = gates_.const_data_ptr<scalar_t>();
          args.cells = cells_.const_data_ptr<scalar_t>();
          args.grad_output = grad_output_.const_data_ptr<scalar_t>();
          args.grad_cells = const_rows<scalar_t>(grad_cells_, {});
          args.grad_h_n = const_rows<scalar_t>(grad_h_n_, {});
          args.grad_c_n = const_rows<scalar_t>(grad_c_n_, {});
          args.d_preactivations =
              d_preactivations_.mutable_data_ptr<scalar_t>();
          args.d_h0 = d_h0.mutable_data_ptr<scalar_t>();
          args.d_c0 = d_c0.mutable_data_ptr<scalar_t>();
          return count_launch(
              Device::launch_recurrence(args, Device::stream()),
              "lltm::sequence_backward");
        });
  }

  std::tuple<at::Tensor, at::Tensor> run_steps() const {
    const auto options =
        gates_.options().dtype(at::toOpMathType(gates_.scalar_type()));
    // The gradients of the last state wait here for the step that made it.
    const auto begin_with = [&](const at::Tensor& gradient) {
      return gradient.defined()
          ? gradient.to(options, /*non_blocking=*/false, /*copy=*/true)
          : at::zeros(state_sizes_, options);
    };
    const auto d_h = begin_with(grad_h_n_);
    const auto d_cell = begin_with(grad_c_n_);
    const auto weights = weights_for_products(
        weights_for_h_, static_cast<int64_t>(steps_.size()));
    const SequenceStep* next = nullptr;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      run_pointwise(*step, next, d_h, d_cell);
      auto d_h_of_step = d_h.narrow(0, 0, step->rows);
      Device::mm_out(d_h_of_step, of_step(d_preactivations_, *step), weights);
      next = &*step;
    }
    run_pointwise({0, 0, 0}, next, d_h, d_cell); // the resets of the first step
    return {d_h.to(gates_.scalar_type()), d_cell.to(gates_.scalar_type())};
  }

  void run_pointwise(
      const SequenceStep& step,
      const SequenceStep* next,
      const at::Tensor& d_h,
      const at::Tensor& d_cell) const {
    const auto next_resets = resets_of(resets_, next);
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, gates_.scalar_type(), "lltm_backward", [&] {
          using opmath_t = at::opmath_type<scalar_t>;
          launch_pointwise<Device>(
              std::max(step.rows, next_resets.rows),
              d_h.size(1),
              SequenceBackwardUnit<scalar_t>{
                  .math = CellMath<opmath_t>(a_),
                  .state_size = d_h.size(1),
                  .rows = step.rows,
                  .grad_output = const_rows<scalar_t>(grad_output_, step),
                  .grad_cells = const_rows<scalar_t>(grad_cells_, step),
                  .cells = const_rows<scalar_t>(cells_, step),
                  .gates = const_rows<scalar_t>(gates_, step),
                  .d_preactivations =
                      mutable_rows<scalar_t>(d_preactivations_, step),
                  .d_h = d_h.mutable_data_ptr<opmath_t>(),
                  .d_cell = d_cell.mutable_data_ptr<opmath_t>(),
                  .next_resets = next_resets});
        });
  }

  const SequenceBackwardArguments& a_;
  const std::vector<SequenceStep>& steps_;
  const at::Tensor grad_output_;
  const at::Tensor grad_cells_; // these three, or undefined: zeros
  const at::Tensor grad_h_n_;
  const at::Tensor grad_c_n_;
  const at::Tensor cells_;
  const at::Tensor gates_;
  const at::Tensor weights_for_h_;
  const at::Tensor resets_;
  const at::Tensor d_preactivations_;
  const at::IntArrayRef state_sizes_;
  const std::optional<recurrence::Sequence> sequence_;
};

// The state that each step begins with, [rows, state_size], out of the states
// after all steps and the initial one. Few operators for many steps: each is a
// launch.
inline at::Tensor old_states(
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

// The gradient of the weights for h and for input, in one tensor. Without
// batch_sizes and resets, the states that steps began with lie in output and
// are not copied.
inline at::Tensor d_weights_of_sequence(
    const SequenceBackwardArguments& a,
    const std::vector<SequenceStep>& steps,
    const at::Tensor& input_rows,
    const at::Tensor& d_preactivations) {
  auto d_weights = at::empty(a.weights.sizes(), a.input.options());
  if (d_preactivations.numel() == 0) {
    return d_weights.zero_();
  }
  const auto state_size = a.h0.size(1);
  auto for_h = d_weights.narrow(1, 0, state_size);
  auto for_input = d_weights.narrow(1, state_size, a.input.size(-1));
  const auto output = as_rows(a.output);
  at::mm_out(for_input, d_preactivations.t(), input_rows);
  if (a.batch_sizes || a.resets) {
    const auto resets =
        a.resets ? OptionalTensor(flat_or_none(a.resets)) : OptionalTensor();
    const auto old_h = old_states(steps, output, a.h0, a.reverse, resets);
    at::mm_out(for_h, d_preactivations.t(), old_h);
    return d_weights;
  }
  const auto& first = steps.front();
  at::mm_out(for_h, of_step(d_preactivations, first).t(), a.h0);
  const auto rest = output.size(0) - first.rows;
  const auto later =
      d_preactivations.narrow(0, a.reverse ? 0 : first.rows, rest);
  const auto earlier = output.narrow(0, a.reverse ? first.rows : 0, rest);
  for_h.addmm_(later.t(), earlier);
  return d_weights;
}

template <SequenceDevice Device>
BackwardResult sequence_backward_impl(const SequenceBackwardArguments& a) {
  check_arguments(a);
  const typename Device::Guard device_guard(a.input.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto steps = sequence_steps(a);
  const auto input_rows = as_rows(a.input);
  const auto d_preactivations =
      at::empty({input_rows.size(0), a.weights.size(0)}, a.input.options());
  at::Tensor d_input, d_bias, d_h0, d_c0;
  if (d_preactivations.numel() == 0) {
    // No step runs, so the last state is the first.
    const auto copy_or_zeros = [&](const OptionalTensor& gradient) {
      return gradient ? gradient->clone(at::MemoryFormat::Contiguous)
                      : at::zeros(a.h0.sizes(), a.input.options());
    };
    d_h0 = copy_or_zeros(a.grad_h_n);
    d_c0 = copy_or_zeros(a.grad_c_n);
  } else {
    std::tie(d_h0, d_c0) =
        BackwardSteps<Device>(a, steps, d_preactivations).run();
  }
  std::tie(d_input, std::ignore, d_bias, std::ignore, std::ignore) =
      pre_activations_backward(
          d_preactivations,
          {},
          input_rows,
          a.weights,
          a.h0,
          {a.output_mask[0], false, a.output_mask[2], false, false});
  return {
      a.output_mask[0] ? d_input.view(a.input.sizes()) : at::Tensor(),
      a.output_mask[1]
          ? d_weights_of_sequence(a, steps, input_rows, d_preactivations)
          : at::Tensor(),
      d_bias,
      a.output_mask[3] ? d_h0 : at::Tensor(),
      a.output_mask[4] ? d_c0 : at::Tensor()};
}

} // namespace lltm
