#pragma once

#include "cuda/launch_pointwise.h"
#include "cuda/lltm_pointwise.h"
#include "cuda/recurrence/arguments.h"
#include "ops/checks.h"
#include "ops/lltm_composite.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_composite.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>

// The sequence operators, but for what is CUDA's, which is the Device's. It has
// what the Device of the cell has (cuda_device.cuh), and
//
//   kBytesOfGates          what the gates of a chunk may take, where nobody
//                          wants them;
//   mm_out(out, a, b)      out = a @ b, in the dtype of out;
//   recurrence_is_on()     whether to try it;
//   fill_sentinel(tensor)  sets all its bytes to 0xff;
//   launch_recurrence(     what recurrence/launch.h says.
//       args, stream)
//
// So tests run all of this on the host. One GEMM makes the products with input
// of many steps. Then either the recurrence does the rest, or each step makes
// its products with h by one GEMM, and its gates in one kernel.
namespace lltm {

inline at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.contiguous().flatten(0, -2);
}

inline at::Tensor flat_or_none(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous().flatten() : at::Tensor();
}

// Read as bytes, because any byte but 0 is a reset.
inline const uint8_t* bytes_or_null(const at::Tensor& resets) {
  return resets.defined()
      ? reinterpret_cast<const uint8_t*>(resets.const_data_ptr<bool>())
      : nullptr;
}

// step: or null.
inline RowResets resets_of(const at::Tensor& resets, const SequenceStep* step) {
  if (!resets.defined() || step == nullptr) {
    return {nullptr, 0};
  }
  return {bytes_or_null(resets) + step->first_row, step->rows};
}

// A pointer to the rows of a step.
template <typename scalar_t>
scalar_t* mutable_rows(const at::Tensor& rows, const SequenceStep& step) {
  return rows.mutable_data_ptr<scalar_t>() + step.first_row * rows.size(1);
}

template <typename scalar_t>
const scalar_t* const_rows(const at::Tensor& rows, const SequenceStep& step) {
  return rows.const_data_ptr<scalar_t>() + step.first_row * rows.size(1);
}

// How many launches of the recurrence had each outcome, in this process.
inline std::array<std::atomic<int64_t>, recurrence::kOutcomes> outcomes{};

// Whether it ran. The first of each other outcome warns.
template <typename Device, typename Args>
bool launch_recurrence(const Args& args, const char* operator_name) {
  constexpr const char* kReasons[recurrence::kOutcomes] = {
      "",
      "the GPU is too small for its batch, or too old",
      "CUDA does not say whether the GPU can run it: ",
      "CUDA refuses the launch: "};
  const auto launched = Device::launch_recurrence(args, Device::stream());
  const auto outcome = static_cast<size_t>(launched.outcome);
  const bool ran = launched.outcome == recurrence::Outcome::kRan;
  if (++outcomes[outcome] == 1 && !ran) {
    TORCH_WARN(
        operator_name,
        ": a sequence runs step by step, which is slower than in one kernel, "
        "because ",
        kReasons[outcome],
        launched.error);
  }
  return ran;
}

// In fewer steps, loading the weights into registers costs as much as the
// recurrence saves.
constexpr size_t kLeastStepsOfRecurrence = 3;

// Returns nothing if the recurrence is off, or does not take the sequence.
template <typename Device, typename Arguments>
std::optional<recurrence::Sequence> recurrence_sequence(
    const Arguments& a,
    const std::vector<SequenceStep>& steps) {
  const auto batch = a.h0.size(0);
  const auto state_size = a.h0.size(1);
  const bool packed = a.batch_sizes.has_value();
  const bool fits = Device::recurrence_is_on() &&
      steps.size() >= kLeastStepsOfRecurrence &&
      (a.h0.scalar_type() == at::kHalf ||
       a.h0.scalar_type() == at::kBFloat16) &&
      state_size % recurrence::kColumns == 0 && state_size > 0 &&
      state_size <= recurrence::kMostUnits &&
      batch <= (packed ? recurrence::kMostPackedBatch : INT32_MAX);
  if (!fits) {
    return std::nullopt;
  }
  recurrence::Sequence sequence{};
  sequence.steps = static_cast<int32_t>(steps.size());
  sequence.batch = static_cast<int32_t>(batch);
  sequence.reverse = a.reverse;
  sequence.packed = packed;
  for (int64_t t = 0; packed && t < sequence.steps; ++t) {
    const auto rows_of = [&](int64_t t) {
      return steps[a.reverse ? sequence.steps - 1 - t : t].rows;
    };
    const auto rows_of_next = t + 1 < sequence.steps ? rows_of(t + 1) : 0;
    std::fill(
        sequence.lengths + rows_of_next,
        sequence.lengths + rows_of(t),
        static_cast<int32_t>(t + 1));
  }
  return sequence;
}

inline recurrence::Cursor
cursor_of(const std::vector<SequenceStep>& steps, int64_t i, bool reverse) {
  const auto last = static_cast<int64_t>(steps.size()) - 1;
  return {
      static_cast<int32_t>(reverse ? last - i : i),
      static_cast<int32_t>(steps[i].rows),
      steps[i].first_row};
}

// Returns a contiguous tensor, aligned for the recurrence.
inline at::Tensor aligned(const at::Tensor& tensor) {
  const auto contiguous = tensor.contiguous();
  const auto address = reinterpret_cast<uintptr_t>(contiguous.const_data_ptr());
  return address % sizeof(recurrence::Words) == 0 ? contiguous
                                                  : contiguous.clone();
}

// Returns the weights for h as so many products shall read them. cuBLAS is slow
// where rows do not begin at multiples of 16 bytes, as with an odd number of
// input features. Then a copy is worth its time, if its own rows do.
inline at::Tensor weights_for_products(
    const at::Tensor& weights_for_h,
    int64_t products) {
  const auto is_aligned = [&](int64_t elements) {
    return elements * weights_for_h.element_size() % 16 == 0;
  };
  const bool copies = products > 1 && !is_aligned(weights_for_h.stride(0)) &&
      is_aligned(weights_for_h.size(1));
  return copies ? weights_for_h.contiguous() : weights_for_h;
}

template <typename Device>
class ForwardSteps {
 public:
  ForwardSteps(
      const SequenceForwardArguments& a,
      const std::vector<SequenceStep>& steps,
      const at::Tensor& output,
      const at::Tensor& cells)
      : steps_(steps),
        reverse_(a.reverse),
        weights_for_h_(a.weights.narrow(1, 0, a.h0.size(1))),
        h0_(aligned(a.h0)),
        resets_(flat_or_none(a.resets)),
        output_(output.flatten(0, -2)),
        cells_(cells.flatten(0, -2)),
        cell_(a.c0.to(
            at::toOpMathType(a.c0.scalar_type()),
            /*non_blocking=*/false,
            /*copy=*/true,
            at::MemoryFormat::Contiguous)),
        sequence_(recurrence_sequence<Device>(a, steps)) {}

  // gates belong to the chunk, and hold its products with input, plus bias.
  template <bool write_gates>
  void run(const SequenceChunk& chunk, const at::Tensor& gates) {
    if (sequence_ && run_recurrence(chunk, gates, write_gates)) {
      return;
    }
    sequence_.reset();
    if (!h_.defined()) {
      enter(chunk.begin);
    }
    for (auto i = chunk.begin; i < chunk.end; ++i) {
      const auto row = steps_[i].first_row - chunk.first_row;
      run_step<write_gates>(i, gates.narrow(0, row, steps_[i].rows));
    }
  }

 private:
  bool run_recurrence(
      const SequenceChunk& chunk,
      const at::Tensor& gates,
      bool write_gates) {
    if (chunk.begin == 0) {
      Device::fill_sentinel(output_);
    }
    bool ran = false;
    AT_DISPATCH_REDUCED_FLOATING_TYPES(h0_.scalar_type(), "lltm_forward", [&] {
      recurrence::Forward<scalar_t> args{};
      args.sequence = *sequence_;
      args.count = static_cast<int32_t>(chunk.end - chunk.begin);
      args.first = cursor_of(steps_, chunk.begin, reverse_);
      if (chunk.begin > 0) {
        args.before = cursor_of(steps_, chunk.begin - 1, reverse_);
      }
      args.state_size = static_cast<int32_t>(h0_.size(1));
      args.weights = weights_for_h_.const_data_ptr<scalar_t>();
      args.weights_strides[0] = weights_for_h_.stride(0);
      args.weights_strides[1] = weights_for_h_.stride(1);
      args.h0 = h0_.const_data_ptr<scalar_t>();
      args.cell = cell_.mutable_data_ptr<float>();
      args.resets = bytes_or_null(resets_);
      args.gates = gates.mutable_data_ptr<scalar_t>();
      args.gates_row = chunk.first_row;
      args.write_gates = write_gates;
      args.output = output_.mutable_data_ptr<scalar_t>();
      args.cells = cells_.mutable_data_ptr<scalar_t>();
      ran = launch_recurrence<Device>(args, "lltm::sequence_forward");
    });
    return ran;
  }

  // Makes h_, and resets cell_, for the steps from i on.
  void enter(int64_t i) {
    const auto& step = steps_[i];
    weights_for_h_ = weights_for_products(
        weights_for_h_, static_cast<int64_t>(steps_.size()) - i);
    h_ = h0_.clone(at::MemoryFormat::Contiguous);
    products_with_h_ =
        at::empty({h_.size(0), weights_for_h_.size(0)}, cell_.options());
    if (i > 0) {
      h_.narrow(0, 0, step.carried)
          .copy_(output_.narrow(0, steps_[i - 1].first_row, step.carried));
    }
    if (resets_.defined()) {
      const auto reset = of_step(resets_, step).unsqueeze(1);
      h_.narrow(0, 0, step.rows).masked_fill_(reset, 0);
      cell_.narrow(0, 0, step.rows).masked_fill_(reset, 0);
    }
  }

  template <bool write_gates>
  void run_step(int64_t i, at::Tensor gates) {
    const auto& step = steps_[i];
    auto products_with_h = products_with_h_.narrow(0, 0, step.rows);
    Device::mm_out(
        products_with_h, h_.narrow(0, 0, step.rows), weights_for_h_.t());
    const bool is_last = i + 1 == static_cast<int64_t>(steps_.size());
    const auto next_resets =
        resets_of(resets_, is_last ? nullptr : &steps_[i + 1]);
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, gates.scalar_type(), "lltm_forward", [&] {
          launch_pointwise<Device>(
              std::max(step.rows, next_resets.rows),
              h_.size(1),
              SequenceForwardUnit<scalar_t, write_gates>{
                  .state_size = h_.size(1),
                  .rows = step.rows,
                  .gates = gates.mutable_data_ptr<scalar_t>(),
                  .products_with_h =
                      products_with_h
                          .const_data_ptr<at::opmath_type<scalar_t>>(),
                  .output = mutable_rows<scalar_t>(output_, step),
                  .cells = mutable_rows<scalar_t>(cells_, step),
                  .h = h_.mutable_data_ptr<scalar_t>(),
                  .cell = cell_.mutable_data_ptr<at::opmath_type<scalar_t>>(),
                  .next_resets = next_resets});
        });
  }

  const std::vector<SequenceStep>& steps_;
  const bool reverse_;
  at::Tensor weights_for_h_;
  const at::Tensor h0_;
  const at::Tensor resets_;
  const at::Tensor output_;
  const at::Tensor cells_;
  const at::Tensor cell_; // of the whole batch
  // These two are of the whole batch, too. They are defined once steps run one
  // by one.
  at::Tensor h_;
  at::Tensor products_with_h_;
  std::optional<recurrence::Sequence> sequence_;
};

template <typename Device, bool write_gates>
ForwardWithGatesResult sequence_forward_impl(
    const SequenceForwardArguments& a) {
  check_arguments(a);
  const typename Device::Guard device_guard(a.input.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
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
  ForwardSteps<Device> forward(a, steps, output, cells);
  const auto input_rows = a.input.flatten(0, -2);
  const auto weights_for_input =
      a.weights.narrow(1, state_size, a.input.size(-1)).t();
  // If the gates are not wanted, their memory does not grow with time.
  const auto most = Device::kBytesOfGates /
      (3 * state_size * static_cast<int64_t>(a.input.element_size()));
  const auto chunks =
      sequence_chunks(steps, write_gates ? input_rows.size(0) : most);
  const auto buffer = write_gates
      ? gates.flatten(0, -2)
      : at::empty({most_rows(chunks), 3 * state_size}, a.input.options());
  for (const auto& chunk : chunks) {
    auto products = buffer.narrow(0, 0, chunk.rows);
    at::addmm_out(
        products,
        a.bias,
        input_rows.narrow(0, chunk.first_row, chunk.rows),
        weights_for_input);
    forward.template run<write_gates>(chunk, products);
  }
  return {std::move(output), std::move(cells), std::move(gates)};
}

template <typename Device>
class BackwardSteps {
 public:
  BackwardSteps(
      const SequenceBackwardArguments& a,
      const std::vector<SequenceStep>& steps,
      const at::Tensor& d_gates)
      : steps_(steps),
        grad_output_(as_rows(a.grad_output)),
        grad_cells_(as_rows(a.grad_cells)),
        cells_(as_rows(a.cells)),
        gates_(as_rows(a.gates)),
        weights_for_h_(a.weights.narrow(1, 0, a.h0.size(1))),
        resets_(flat_or_none(a.resets)),
        d_gates_(d_gates),
        state_sizes_(a.h0.sizes()),
        sequence_(recurrence_sequence<Device>(a, steps)) {}

  // d_h0 and d_c0, of the dtype of gates. Writes d_gates.
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
    Device::fill_sentinel(d_gates_);
    bool ran = false;
    AT_DISPATCH_REDUCED_FLOATING_TYPES(
        gates_.scalar_type(), "lltm_backward", [&] {
          recurrence::Backward<scalar_t> args{};
          args.sequence = *sequence_;
          args.last =
              cursor_of(steps_, sequence_->steps - 1, sequence_->reverse);
          args.state_size = static_cast<int32_t>(d_h0.size(1));
          args.weights = weights_for_h_.const_data_ptr<scalar_t>();
          args.weights_strides[0] = weights_for_h_.stride(0);
          args.weights_strides[1] = weights_for_h_.stride(1);
          args.gates = gates_.const_data_ptr<scalar_t>();
          args.cells = cells_.const_data_ptr<scalar_t>();
          args.grad_output = grad_output_.const_data_ptr<scalar_t>();
          args.grad_cells = grad_cells_.const_data_ptr<scalar_t>();
          args.resets = bytes_or_null(resets_);
          args.d_gates = d_gates_.mutable_data_ptr<scalar_t>();
          args.d_h0 = d_h0.mutable_data_ptr<scalar_t>();
          args.d_c0 = d_c0.mutable_data_ptr<scalar_t>();
          ran = launch_recurrence<Device>(args, "lltm::sequence_backward");
        });
    return ran;
  }

  std::tuple<at::Tensor, at::Tensor> run_steps() const {
    const auto options =
        gates_.options().dtype(at::toOpMathType(gates_.scalar_type()));
    const auto d_h = at::zeros(state_sizes_, options);
    const auto d_cell = at::zeros(state_sizes_, options);
    const auto weights = weights_for_products(
        weights_for_h_, static_cast<int64_t>(steps_.size()));
    const SequenceStep* next = nullptr;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      run_pointwise(*step, next, d_h, d_cell);
      auto d_h_of_step = d_h.narrow(0, 0, step->rows);
      Device::mm_out(d_h_of_step, of_step(d_gates_, *step), weights);
      next = &*step;
    }
    if (resets_.defined()) {
      run_pointwise({0, 0, 0}, next, d_h, d_cell);
    }
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
                  .state_size = d_h.size(1),
                  .rows = step.rows,
                  .grad_output = const_rows<scalar_t>(grad_output_, step),
                  .grad_cells = const_rows<scalar_t>(grad_cells_, step),
                  .cells = const_rows<scalar_t>(cells_, step),
                  .gates = const_rows<scalar_t>(gates_, step),
                  .d_gates = mutable_rows<scalar_t>(d_gates_, step),
                  .d_h = d_h.mutable_data_ptr<opmath_t>(),
                  .d_cell = d_cell.mutable_data_ptr<opmath_t>(),
                  .next_resets = next_resets});
        });
  }

  const std::vector<SequenceStep>& steps_;
  const at::Tensor grad_output_;
  const at::Tensor grad_cells_;
  const at::Tensor cells_;
  const at::Tensor gates_;
  const at::Tensor weights_for_h_;
  const at::Tensor resets_;
  const at::Tensor d_gates_;
  const at::IntArrayRef state_sizes_;
  const std::optional<recurrence::Sequence> sequence_;
};

// The gradient of the weights for h and for input, in one tensor. Without
// batch_sizes and resets, the states that steps began with lie in output and
// are not copied.
inline at::Tensor d_weights_of_sequence(
    const SequenceBackwardArguments& a,
    const std::vector<SequenceStep>& steps,
    const at::Tensor& input_rows,
    const at::Tensor& d_gates) {
  auto d_weights = at::empty(a.weights.sizes(), a.input.options());
  if (d_gates.numel() == 0) {
    return d_weights.zero_();
  }
  const auto state_size = a.h0.size(1);
  auto for_h = d_weights.narrow(1, 0, state_size);
  auto for_input = d_weights.narrow(1, state_size, a.input.size(-1));
  const auto output = as_rows(a.output);
  at::mm_out(for_input, d_gates.t(), input_rows);
  if (a.batch_sizes || a.resets) {
    const auto resets =
        a.resets ? OptionalTensor(flat_or_none(a.resets)) : OptionalTensor();
    const auto old_h =
        composite::old_states(steps, output, a.h0, a.reverse, resets);
    at::mm_out(for_h, d_gates.t(), old_h);
    return d_weights;
  }
  const auto& first = steps.front();
  at::mm_out(for_h, of_step(d_gates, first).t(), a.h0);
  const auto rest = output.size(0) - first.rows;
  const auto later = d_gates.narrow(0, a.reverse ? 0 : first.rows, rest);
  const auto earlier = output.narrow(0, a.reverse ? first.rows : 0, rest);
  for_h.addmm_(later.t(), earlier);
  return d_weights;
}

template <typename Device>
BackwardResult sequence_backward_impl(const SequenceBackwardArguments& a) {
  check_arguments(a);
  const typename Device::Guard device_guard(a.input.device());
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  const auto steps = sequence_steps(a);
  const auto input_rows = as_rows(a.input);
  const auto d_gates =
      at::empty({input_rows.size(0), a.weights.size(0)}, a.input.options());
  at::Tensor d_h0, d_c0;
  if (d_gates.numel() == 0) {
    d_h0 = at::zeros(a.h0.sizes(), a.input.options());
    d_c0 = at::zeros(a.h0.sizes(), a.input.options());
  } else {
    std::tie(d_h0, d_c0) = BackwardSteps<Device>(a, steps, d_gates).run();
  }
  auto [d_input, none, d_bias, nothing, neither] = pre_activations_backward(
      d_gates,
      {},
      input_rows,
      a.weights,
      a.h0,
      {a.output_mask[0], false, a.output_mask[2], false, false});
  return {
      a.output_mask[0] ? d_input.view(a.input.sizes()) : at::Tensor(),
      a.output_mask[1] ? d_weights_of_sequence(a, steps, input_rows, d_gates)
                       : at::Tensor(),
      d_bias,
      a.output_mask[3] ? d_h0 : at::Tensor(),
      a.output_mask[4] ? d_c0 : at::Tensor()};
}

} // namespace lltm
