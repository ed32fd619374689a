#pragma once

#include "cuda/lltm_sequence_recurrence.h"

#include <ATen/ops/addmm.h>

namespace lltm {

// Returns a contiguous tensor, aligned for the recurrence.
inline at::Tensor aligned(const at::Tensor& tensor) {
  const auto contiguous = tensor.contiguous();
  const auto address = reinterpret_cast<uintptr_t>(contiguous.const_data_ptr());
  return address % sizeof(recurrence::Words) == 0 ? contiguous
                                                  : contiguous.clone();
}

template <SequenceDevice Device>
class ForwardSteps {
 public:
  ForwardSteps(
      const SequenceForwardArguments& a,
      const std::vector<SequenceStep>& steps,
      const at::Tensor& output,
      const at::Tensor& cells)
      : a_(a),
        steps_(steps),
        reverse_(a.reverse),
        weights_for_h_(a.weights.narrow(1, 0, a.h0.size(1))),
        h0_(aligned(a.h0)),
        resets_(flat_or_none(a.resets)),
        output_(as_rows(output)),
        cells_(as_rows(cells)),
        cell_(a.c0.to(
            at::toOpMathType(a.c0.scalar_type()),
            /*non_blocking=*/false,
            /*copy=*/true,
            at::MemoryFormat::Contiguous)),
        sequence_(recurrence_sequence<Device>(a, steps)) {}

  // products: those of the chunk with input, plus bias. If write_gates, the
  // gates replace them.
  template <bool write_gates>
  void run(const SequenceChunk& chunk, const at::Tensor& products) {
    if (sequence_ && run_recurrence(chunk, products, write_gates)) {
      return;
    }
    sequence_.reset();
    if (!h_.defined()) {
      begin_steps(chunk.begin);
    }
    for (auto i = chunk.begin; i < chunk.end; ++i) {
      const auto row = steps_[i].first_row - chunk.first_row;
      run_step<write_gates>(i, products.narrow(0, row, steps_[i].rows));
    }
  }

  // It has the type of opmath.
  const at::Tensor& last_cell() const {
    return cell_;
  }

 private:
  bool run_recurrence(
      const SequenceChunk& chunk,
      const at::Tensor& products,
      bool write_gates) {
    if (chunk.begin == 0) {
      Device::fill_sentinel(output_);
    }
    return AT_DISPATCH_REDUCED_FLOATING_TYPES(
        h0_.scalar_type(), "lltm_forward", [&] {
          recurrence::Forward<scalar_t> args{};
          set_common(args, a_, *sequence_, weights_for_h_, resets_);
          args.launch_steps = static_cast<int32_t>(chunk.end - chunk.begin);
          args.first_step = cursor_of(steps_, chunk.begin, reverse_);
          if (chunk.begin > 0) {
            args.before = cursor_of(steps_, chunk.begin - 1, reverse_);
          }
          args.h0 = h0_.const_data_ptr<scalar_t>();
          args.cell = cell_.mutable_data_ptr<float>();
          args.products = products.mutable_data_ptr<scalar_t>();
          args.products_row = chunk.first_row;
          args.write_gates = write_gates;
          args.output = output_.mutable_data_ptr<scalar_t>();
          args.cells = cells_.mutable_data_ptr<scalar_t>();
          return count_launch(
              Device::launch_recurrence(args, Device::stream()),
              "lltm::sequence_forward");
        });
  }

  // Makes h_, and resets cell_, for the steps that run one by one from i on.
  void begin_steps(int64_t i) {
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
  void run_step(int64_t i, const at::Tensor& products) {
    const auto& step = steps_[i];
    auto products_with_h = products_with_h_.narrow(0, 0, step.rows);
    Device::mm_out(
        products_with_h, h_.narrow(0, 0, step.rows), weights_for_h_.t());
    const bool is_last = i + 1 == static_cast<int64_t>(steps_.size());
    const auto next_resets =
        resets_of(resets_, is_last ? nullptr : &steps_[i + 1]);
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, products.scalar_type(), "lltm_forward", [&] {
          launch_pointwise<Device>(
              std::max(step.rows, next_resets.rows),
              h_.size(1),
              SequenceForwardUnit<scalar_t, write_gates>{
                  .math = CellMath<at::opmath_type<scalar_t>>(a_),
                  .state_size = h_.size(1),
                  .rows = step.rows,
                  .products = products.mutable_data_ptr<scalar_t>(),
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

  const SequenceForwardArguments& a_;
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
  // Nothing once the recurrence has not taken it.
  std::optional<recurrence::Sequence> sequence_;
};

template <SequenceDevice Device, bool write_gates>
SequenceForwardWithGatesResult sequence_forward_impl(
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
    const auto format = at::MemoryFormat::Contiguous;
    return {output, cells, a.h0.clone(format), a.c0.clone(format), gates};
  }
  ForwardSteps<Device> forward(a, steps, output, cells);
  const auto input_rows = as_rows(a.input);
  const auto weights_for_input =
      a.weights.narrow(1, state_size, a.input.size(-1)).t();
  // If the gates are not wanted, their memory does not grow with time.
  const auto most = Device::kBytesOfGates /
      (3 * state_size * static_cast<int64_t>(a.input.element_size()));
  const auto chunks =
      sequence_chunks(steps, write_gates ? input_rows.size(0) : most);
  const auto buffer = write_gates
      ? as_rows(gates)
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
  return {
      output,
      cells,
      last_states(steps, as_rows(output), a.h0),
      forward.last_cell().to(
          a.c0.scalar_type(), /*non_blocking=*/false, /*copy=*/true),
      gates};
}

} // namespace lltm
