#include "cpu/lltm_gradients.h"
#include "cpu/lltm_sequence_old_h.h"
#include "cpu/lltm_sequence_plan.h"
#include "cpu/primitives/barrier.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/product_on_threads.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>
#include <c10/macros/Macros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

// lltm::sequence_backward on the CPU, and lltm::backward, which is that of a
// sequence of one step: from the tensors (at the end of the file) to the
// gradients of the pre-activations and of the first states, step by step.
// lltm_gradients.h has the others, which are products.
namespace lltm {

namespace {

// There are many rows, because each chunk reads and writes d_weights once.
constexpr int64_t kRowsOfAChunk = 1024;

// To contiguous memory; batch is that of h0.
template <typename scalar_t>
struct BackwardPointers {
  CellSizes sizes;
  CellMath<at::opmath_type<scalar_t>> math;
  // Null: not wanted.
  scalar_t* d_input;
  scalar_t* d_weights;
  scalar_t* d_bias;
  scalar_t* d_h0;
  scalar_t* d_c0;
  const std::vector<SequenceStep>& steps;
  bool has_batch_sizes;
  const scalar_t* grad_output;
  const scalar_t* grad_cells;
  const scalar_t* grad_h_n; // null: zeros
  const scalar_t* grad_c_n; // null: zeros
  const scalar_t* output;
  const scalar_t* cells;
  const scalar_t* gates;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* h0;
  Resets resets;

  // Then the gradient of h0 is one product, as that of the input is.
  bool is_one_step() const {
    return steps.size() == 1 && resets.data == nullptr;
  }
};

// A body for run_with_best_isa(): units [first_unit, end_unit) of some rows.
// The gradients that pass between steps are not rounded.
template <typename scalar_t, typename gemm_t>
struct PointwiseBackward {
  using opmath_t = at::opmath_type<scalar_t>;

  int64_t state_size;
  CellMath<opmath_t> math;
  int64_t first_unit;
  int64_t end_unit;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  Matrix<gemm_t> d_preactivations;
  // From the step after this one; d_cell then is that of the old cell state.
  const opmath_t* d_h;
  opmath_t* d_cell;

  // begin and end count rows.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    for (auto row = begin; row < end; ++row) {
      const auto at = row * state_size;
      one_row(
          grad_h + at,
          grad_cell + at,
          new_cell + at,
          gates + kGates * at,
          d_preactivations.row(row),
          d_h + at,
          d_cell + at);
    }
  }

 private:
  C10_ALWAYS_INLINE void one_row(
      const scalar_t* __restrict__ grad_h,
      const scalar_t* __restrict__ grad_cell,
      const scalar_t* __restrict__ new_cell,
      const scalar_t* __restrict__ gates,
      gemm_t* __restrict__ d_preactivations,
      const opmath_t* __restrict__ d_h,
      opmath_t* __restrict__ d_cell) const {
    const auto math = this->math; // no store changes it
    for (auto i = first_unit; i < end_unit; ++i) {
      const auto out = math.backward(
          to_opmath(grad_h[i]) + d_h[i],
          to_opmath(grad_cell[i]) + d_cell[i],
          lltm::tanh(to_opmath(new_cell[i])),
          to_opmath(gates[i]),
          to_opmath(gates[i + state_size]),
          to_opmath(gates[i + 2 * state_size]));
      from_opmath(out.d_input_gate, d_preactivations[i]);
      from_opmath(out.d_output_gate, d_preactivations[i + state_size]);
      from_opmath(out.d_candidate, d_preactivations[i + 2 * state_size]);
      d_cell[i] = out.d_old_cell;
    }
  }
};

// Chunks of steps from the last to the first: the gradients of the
// pre-activations step by step, then the products of all rows of a chunk.
template <typename scalar_t, typename gemm_t>
class Backward {
 public:
  explicit Backward(const BackwardPointers<scalar_t>& pointers)
      : p_(pointers),
        multiplies_steps_(!p_.is_one_step()),
        state_(p_.sizes.batch * p_.sizes.state_size),
        plan_(plan_of(
            p_.sizes,
            p_.steps.size(),
            p_.has_batch_sizes,
            panel_width<gemm_t>(p_.sizes.state_size),
            multiplies_steps_ ? 2 * kGates * p_.sizes.state_size : 0,
            available_threads())),
        chunks_(sequence_chunks(p_.steps, kRowsOfAChunk)),
        weights_(
            p_.sizes.gate_units(),
            multiplies_steps_ ? p_.sizes.state_size : 0,
            plan_.units_per_panel),
        d_h_(state_),
        d_cell_(state_),
        d_preactivations_(
            most_rows(chunks_),
            p_.sizes.gate_units(),
            p_.d_weights != nullptr),
        old_h_(
            multiplies_steps_ && p_.d_weights != nullptr
                ? most_rows(chunks_) * p_.sizes.state_size
                : 0),
        d_weights_(
            p_.d_weights,
            p_.sizes.gate_units() * p_.sizes.features(),
            chunks_.size() > 1),
        d_bias_(p_.d_bias, p_.sizes.gate_units(), chunks_.size() > 1) {}

  void run() {
    RECORD_USER_SCOPE(name_of_plan<gemm_t>(plan_));
    begin_with(p_.grad_h_n, d_h_.data());
    begin_with(p_.grad_c_n, d_cell_.data());
    if (multiplies_steps_) {
      pack_rows_on_threads<scalar_t, gemm_t>(
          {p_.weights, p_.sizes.features()}, p_.sizes.gate_units(), weights_);
    }
    for (auto chunk = chunks_.rbegin(); chunk != chunks_.rend(); ++chunk) {
      run_together(
          plan_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
            const ProductGuard<gemm_t> guard;
            run_steps(*chunk, begin, end, barrier);
          });
      multiply_chunk(*chunk, chunk != chunks_.rbegin());
    }
    d_weights_.write();
    d_bias_.write();
    // These remain after all steps: the first step that has a row of the batch
    // is the last to write its gradient.
    if (multiplies_steps_ && p_.d_h0 != nullptr) {
      convert(d_h_.data(), p_.d_h0, state_);
    }
    if (p_.d_c0 != nullptr) {
      convert(d_cell_.data(), p_.d_c0, state_);
    }
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;

  // The gradients of the last state wait here for the step that made it.
  void begin_with(const scalar_t* gradient, opmath_t* d_state) {
    if (gradient == nullptr) {
      std::fill_n(d_state, state_, opmath_t(0));
    } else {
      convert(gradient, d_state, state_);
    }
  }

  void run_steps(
      const SequenceChunk& chunk,
      int64_t begin,
      int64_t end,
      Barrier& barrier) {
    for (int64_t i = chunk.end - 1; i >= chunk.begin; --i) {
      const auto rows = d_preactivations_.rows().part(
          p_.steps[i].first_row - chunk.first_row, 0);
      for (int64_t slot = begin; slot < end; ++slot) {
        pointwise(slot, i, rows);
      }
      if (i == 0 && p_.d_h0 == nullptr && p_.d_c0 == nullptr) {
        return;
      }
      // One barrier is enough: multiply_step() reads the rows of all slots, but
      // pointwise() reads the d_h and d_cell of its own alone.
      if (plan_.needs_barrier() && !barrier.wait(end - begin)) {
        return;
      }
      for (int64_t slot = begin; slot < end; ++slot) {
        if (multiplies_steps_ && (i > 0 || p_.d_h0 != nullptr)) {
          multiply_step(slot, i, rows);
        }
        reset(slot, i);
      }
    }
  }

  void pointwise(int64_t slot, int64_t i, Matrix<gemm_t> d_preactivations) {
    const auto rows = plan_.rows_of_slot(slot, p_.steps[i].rows);
    const auto units = plan_.units_of_slot(slot);
    const auto first = p_.steps[i].first_row * p_.sizes.state_size;
    run_with_best_isa(
        PointwiseBackward<scalar_t, gemm_t>{
            .state_size = p_.sizes.state_size,
            .math = p_.math,
            .first_unit = units.begin,
            .end_unit = units.end,
            .grad_h = p_.grad_output + first,
            .grad_cell = p_.grad_cells + first,
            .new_cell = p_.cells + first,
            .gates = p_.gates + kGates * first,
            .d_preactivations = d_preactivations,
            .d_h = d_h_.data(),
            .d_cell = d_cell_.data()},
        rows.begin,
        rows.end);
  }

  // d_h = d_preactivations @ columns of weights.
  void multiply_step(
      int64_t slot,
      int64_t i,
      Matrix<const gemm_t> d_preactivations) {
    const auto rows = plan_.rows_of_slot(slot, p_.steps[i].rows);
    const Matrix<opmath_t> d_h{d_h_.data(), p_.sizes.state_size};
    plan_.for_each_panel(slot, i, [&](int64_t panel) {
      multiply<gemm_t>(
          {.M = rows.size(),
           .N = plan_.units_in(panel),
           .K = weights_.terms(),
           .A = d_preactivations.part(rows.begin, 0),
           .B = std::as_const(weights_).panel(panel),
           .C = d_h.part(rows.begin, panel * plan_.units_per_panel),
           .accumulate = false,
           .several_chains = p_.sizes.batch <= 2});
    });
  }

  // No gradient passes a reset.
  void reset(int64_t slot, int64_t i) {
    const auto rows = plan_.rows_of_slot(slot, p_.steps[i].rows);
    for (auto* d_state : {d_h_.data(), d_cell_.data()}) {
      p_.resets.template zero<opmath_t>(
          p_.steps[i],
          rows,
          plan_.units_of_slot(slot),
          {d_state, p_.sizes.state_size});
    }
  }

  void multiply_chunk(const SequenceChunk& chunk, bool accumulate) {
    // The rows of a chunk take the place of a batch.
    const CellSizes sizes{
        chunk.rows, p_.sizes.input_features, p_.sizes.state_size};
    const Matrix<const gemm_t> d_preactivations = d_preactivations_.rows();
    d_bias_.add([&](auto* d_bias) {
      bias_gradient(sizes, d_preactivations, d_bias, accumulate);
    });
    const auto first_input = chunk.first_row * p_.sizes.input_features;
    d_weights_.add([&](auto* d_weights) {
      d_preactivations_.transpose(chunk.rows);
      weights_gradient(
          sizes,
          Matrix<const gemm_t>(d_preactivations_.transposed()),
          multiplies_steps_ ? gather_old_h(chunk) : p_.h0,
          p_.input + first_input,
          d_weights,
          accumulate);
    });
    if (!multiplies_steps_ && p_.d_h0 != nullptr) {
      operand_gradient(
          sizes, d_preactivations, p_.weights, p_.sizes.state_size, p_.d_h0);
    }
    if (p_.d_input != nullptr) {
      operand_gradient(
          sizes,
          d_preactivations,
          p_.weights + p_.sizes.state_size,
          p_.sizes.input_features,
          p_.d_input + first_input);
    }
  }

  // The h that each row of a chunk begins with, in the order of the input.
  const scalar_t* gather_old_h(const SequenceChunk& chunk) {
    const auto size = p_.sizes.state_size;
    at::parallel_for(
        chunk.begin,
        chunk.end,
        grain_size(state_ / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const auto& [first_row, rows, carried] = p_.steps[i];
            auto* to = old_h_.data() + (first_row - chunk.first_row) * size;
            const auto* from =
                old_h_of_step<scalar_t>(p_, i, Share(rows, 0, 1), to);
            if (from != to) {
              std::copy_n(from, rows * size, to);
            }
          }
        });
    return old_h_.data();
  }

  const BackwardPointers<scalar_t>& p_;
  const bool multiplies_steps_;
  const int64_t state_; // elements of h
  const SequencePlan plan_;
  const std::vector<SequenceChunk> chunks_;
  Panels<gemm_t> weights_;
  Scratch<opmath_t> d_h_;
  Scratch<opmath_t> d_cell_;
  PreactivationGradients<gemm_t> d_preactivations_;
  Scratch<scalar_t> old_h_;
  SumOfChunks<scalar_t> d_weights_;
  SumOfChunks<scalar_t> d_bias_;
};

template <typename scalar_t>
void run_backward(const BackwardPointers<scalar_t>& pointers) {
  constexpr bool pairs_fit = true; // odd sizes are padded with zeros
  with_gemm_type<scalar_t>(pairs_fit, [&](auto gemm) {
    Backward<scalar_t, decltype(gemm)>(pointers).run();
  });
}

at::Tensor contiguous_or_none(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous() : at::Tensor();
}

template <typename T>
T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

BackwardResult backward_kernel_impl(
    const SequenceBackwardArguments& a,
    const std::vector<SequenceStep>& steps) {
  const bool has_rows = a.output.numel() > 0;
  const auto memory = [&](bool wanted,
                          at::IntArrayRef sizes,
                          const OptionalTensor& of_last_state = {}) {
    at::Tensor gradient;
    if (wanted) {
      // lltm_forward.cpp says why it is not at::empty().
      gradient = at::detail::empty_cpu(sizes, a.input.options());
    }
    if (wanted && !has_rows) {
      of_last_state ? gradient.copy_(*of_last_state) : gradient.zero_();
    }
    return gradient;
  };
  const BackwardResult result{
      memory(a.output_mask[0], a.input.sizes()),
      memory(a.output_mask[1], a.weights.sizes()),
      memory(a.output_mask[2], {a.weights.size(0)}),
      memory(a.output_mask[3], a.h0.sizes(), a.grad_h_n),
      memory(a.output_mask[4], a.h0.sizes(), a.grad_c_n)};
  if (!has_rows) {
    return result;
  }
  const auto& [d_input, d_weights, d_bias, d_h0, d_c0] = result;
  const auto grad_output =
      (a.grad_output ? *a.grad_output : at::zeros_like(a.output)).contiguous();
  const auto grad_cells =
      (a.grad_cells ? *a.grad_cells : at::zeros_like(a.cells)).contiguous();
  const auto grad_h_n = contiguous_or_none(a.grad_h_n);
  const auto grad_c_n = contiguous_or_none(a.grad_c_n);
  const auto output = a.output.expect_contiguous();
  const auto cells = a.cells.expect_contiguous();
  const auto gates = a.gates.expect_contiguous();
  const auto input = a.input.expect_contiguous();
  const auto weights = a.weights.expect_contiguous();
  const auto h0 = a.h0.expect_contiguous();
  const auto resets = contiguous_or_none(a.resets);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_backward_cpu",
      [&] {
        run_backward<scalar_t>({
            .sizes = {a.h0.size(0), a.input.size(-1), a.h0.size(1)},
            .math = CellMath<at::opmath_type<scalar_t>>(a),
            .d_input = data_or_null<scalar_t>(d_input),
            .d_weights = data_or_null<scalar_t>(d_weights),
            .d_bias = data_or_null<scalar_t>(d_bias),
            .d_h0 = data_or_null<scalar_t>(d_h0),
            .d_c0 = data_or_null<scalar_t>(d_c0),
            .steps = steps,
            .has_batch_sizes = a.batch_sizes.has_value(),
            .grad_output = grad_output.const_data_ptr<scalar_t>(),
            .grad_cells = grad_cells.const_data_ptr<scalar_t>(),
            .grad_h_n = data_or_null<const scalar_t>(grad_h_n),
            .grad_c_n = data_or_null<const scalar_t>(grad_c_n),
            .output = output->const_data_ptr<scalar_t>(),
            .cells = cells->const_data_ptr<scalar_t>(),
            .gates = gates->const_data_ptr<scalar_t>(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .h0 = h0->const_data_ptr<scalar_t>(),
            .resets = Resets(resets),
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
