#include "cpu/lltm_cell.h"
#include "cpu/lltm_sequence_plan.h"
#include "cpu/lltm_sequence_states.h"
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
#include <type_traits>
#include <vector>

// lltm::sequence_backward on the CPU, and lltm::backward, which is that of a
// sequence of one step. Chunks of steps are taken from the last to the first.
// In each, the gradients of the pre-activations and of the states pass from
// step to step; then products of all rows of the chunk give the gradients of
// weights, bias and input.
namespace lltm {

namespace {

// To contiguous memory. The rows of all steps lie one step after the other.
template <typename scalar_t>
struct BackwardPointers {
  CellSizes sizes; // batch is that of h0
  CellMath<at::opmath_type<scalar_t>> math;
  const std::vector<SequenceStep>& steps;
  bool has_batch_sizes;
  // [rows, state_size]
  const scalar_t* grad_output;
  const scalar_t* grad_cells;
  const scalar_t* output;
  const scalar_t* cells;
  const scalar_t* gates;   // [rows, kGates, state_size]
  const scalar_t* input;   // [rows, input_features]
  const scalar_t* weights; // [gate_units, features]
  // [batch, state_size]
  const scalar_t* grad_h_n; // null: zeros
  const scalar_t* grad_c_n; // null: zeros
  const scalar_t* h0;
  Resets resets;
  // The results, in the shapes of what they are the gradients of. Null: not
  // wanted.
  scalar_t* d_input;
  scalar_t* d_weights;
  scalar_t* d_bias;
  scalar_t* d_h0;
  scalar_t* d_c0;
};

template <typename scalar_t>
void run_backward(const BackwardPointers<scalar_t>& pointers);

// Memory for the gradient of a tensor of these sizes. If the output is empty,
// the gradient is complete: the initial state is the last one, and all else is
// unused.
at::Tensor empty_gradient(
    const SequenceBackwardArguments& a,
    bool wanted,
    at::IntArrayRef sizes,
    const OptionalTensor& of_last_state = {}) {
  at::Tensor gradient;
  if (wanted) {
    // Not at::empty(), whose dispatch takes long beside the smallest call.
    gradient = at::detail::empty_cpu(sizes, a.input.options());
  }
  if (wanted && a.output.numel() == 0) {
    of_last_state ? gradient.copy_(*of_last_state) : gradient.zero_();
  }
  return gradient;
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
  const BackwardResult result{
      empty_gradient(a, a.output_mask[0], a.input.sizes()),
      empty_gradient(a, a.output_mask[1], a.weights.sizes()),
      empty_gradient(a, a.output_mask[2], {a.weights.size(0)}),
      empty_gradient(a, a.output_mask[3], a.h0.sizes(), a.grad_h_n),
      empty_gradient(a, a.output_mask[4], a.h0.sizes(), a.grad_c_n)};
  if (a.output.numel() == 0) {
    return result;
  }
  const auto& [d_input, d_weights, d_bias, d_h0, d_c0] = result;
  const auto grad_output =
      (a.grad_output ? *a.grad_output : at::zeros_like(a.output)).contiguous();
  const auto grad_cells =
      (a.grad_cells ? *a.grad_cells : at::zeros_like(a.cells)).contiguous();
  const auto output = a.output.expect_contiguous();
  const auto cells = a.cells.expect_contiguous();
  const auto gates = a.gates.expect_contiguous();
  const auto input = a.input.expect_contiguous();
  const auto weights = a.weights.expect_contiguous();
  const auto grad_h_n = contiguous_or_none(a.grad_h_n);
  const auto grad_c_n = contiguous_or_none(a.grad_c_n);
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
            .steps = steps,
            .has_batch_sizes = a.batch_sizes.has_value(),
            .grad_output = grad_output.const_data_ptr<scalar_t>(),
            .grad_cells = grad_cells.const_data_ptr<scalar_t>(),
            .output = output->const_data_ptr<scalar_t>(),
            .cells = cells->const_data_ptr<scalar_t>(),
            .gates = gates->const_data_ptr<scalar_t>(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .grad_h_n = data_or_null<const scalar_t>(grad_h_n),
            .grad_c_n = data_or_null<const scalar_t>(grad_c_n),
            .h0 = h0->const_data_ptr<scalar_t>(),
            .resets = Resets(resets),
            .d_input = data_or_null<scalar_t>(d_input),
            .d_weights = data_or_null<scalar_t>(d_weights),
            .d_bias = data_or_null<scalar_t>(d_bias),
            .d_h0 = data_or_null<scalar_t>(d_h0),
            .d_c0 = data_or_null<scalar_t>(d_c0),
        });
      });
  return result;
}

BackwardResult backward_kernel(const BackwardArguments& a) {
  check_arguments(a);
  return backward_kernel_impl(
      {.grad_output = a.grad_h,
       .grad_cells = a.grad_cell,
       .grad_h_n = {},
       .grad_c_n = {},
       .output = a.new_cell, // no step reads the h of a step before it
       .cells = a.new_cell,
       .gates = a.gates,
       .input = a.input,
       .weights = a.weights,
       .h0 = a.old_h,
       .output_mask = a.output_mask},
      {{.first_row = 0, .rows = a.input.size(0), .carried = 0}});
}

BackwardResult sequence_backward_kernel(const SequenceBackwardArguments& a) {
  check_arguments(a);
  return backward_kernel_impl(a, sequence_steps(a));
}

template <typename scalar_t, typename gemm_t>
class Backward;

template <typename scalar_t>
void run_backward(const BackwardPointers<scalar_t>& pointers) {
  constexpr bool pairs_fit = true; // odd sizes are padded with zeros
  with_gemm_type<scalar_t>(pairs_fit, [&](auto gemm) {
    Backward<scalar_t, decltype(gemm)>(pointers).run();
  });
}

// There are many rows, because each chunk reads and writes d_weights once.
constexpr int64_t kRowsOfAChunk = 1024;

struct BackwardPlan : SequencePlan {
  explicit BackwardPlan(const SequencePlan& plan) : SequencePlan(plan) {}

  // For one step without resets, as for the gradient of the input. Else each
  // step has a product with the columns of weights for h.
  bool d_h0_is_one_product;
  std::vector<SequenceChunk> chunks;
  int64_t most_rows; // of a chunk
  // d_weights and d_bias add up over the chunks in opmath_t, so half types need
  // memory for the sums.
  bool needs_sums;
  int64_t state_numel;
  int64_t weights_numel;
};

template <typename scalar_t, typename gemm_t>
BackwardPlan plan_of(const BackwardPointers<scalar_t>& p) {
  const auto& sizes = p.sizes;
  const bool d_h0_is_one_product =
      p.steps.size() == 1 && p.resets.data == nullptr;
  const auto units_per_panel = panel_width<gemm_t>(sizes.state_size);
  const auto flop_of_a_unit =
      d_h0_is_one_product ? 0 : 2 * kGates * sizes.state_size;
  BackwardPlan plan(plan_of(
      sizes,
      p.steps.size(),
      p.has_batch_sizes,
      units_per_panel,
      flop_of_a_unit,
      available_threads()));
  plan.d_h0_is_one_product = d_h0_is_one_product;
  plan.chunks = sequence_chunks(p.steps, kRowsOfAChunk);
  plan.most_rows = most_rows(plan.chunks);
  plan.needs_sums = !std::is_same_v<scalar_t, at::opmath_type<scalar_t>> &&
      plan.chunks.size() > 1;
  plan.state_numel = sizes.batch * sizes.state_size;
  plan.weights_numel = sizes.gate_units() * sizes.features();
  return plan;
}

template <typename scalar_t, typename gemm_t>
struct PointwiseBackward;

template <typename scalar_t, typename gemm_t>
class Backward {
  using opmath_t = at::opmath_type<scalar_t>;

  const BackwardPointers<scalar_t>& p_;
  const BackwardPlan plan_;
  // [batch, state_size], not rounded: the gradients of the states that a step
  // leaves, and after it those of the states that it begins with.
  Scratch<opmath_t> d_h_;
  Scratch<opmath_t> d_cell_;
  // The columns of weights for h, unless plan_.d_h0_is_one_product.
  Panels<gemm_t> weights_;
  // They hold the rows of a chunk: [rows, gate_units], and its transpose.
  LeftOperand<gemm_t> d_preactivations_;
  LeftOperand<gemm_t> d_preactivations_t_;
  Scratch<scalar_t> old_h_; // [rows, state_size]
  // [1, rows]. Their product with d_preactivations is d_bias.
  Scratch<gemm_t> ones_;
  // If plan_.needs_sums, the sums over the chunks so far.
  Scratch<opmath_t> d_weights_;
  Scratch<opmath_t> d_bias_;

 public:
  explicit Backward(const BackwardPointers<scalar_t>& pointers)
      : p_(pointers),
        plan_(plan_of<scalar_t, gemm_t>(p_)),
        d_h_(plan_.state_numel),
        d_cell_(plan_.state_numel),
        weights_(
            p_.sizes.gate_units(),
            plan_.d_h0_is_one_product ? 0 : p_.sizes.state_size,
            plan_.units_per_panel),
        d_preactivations_(plan_.most_rows, p_.sizes.gate_units()),
        d_preactivations_t_(p_.sizes.gate_units(), plan_.most_rows),
        old_h_(
            plan_.d_h0_is_one_product ? 0
                                      : plan_.most_rows * p_.sizes.state_size),
        ones_(padded_terms<gemm_t>(plan_.most_rows)),
        d_weights_(plan_.needs_sums ? plan_.weights_numel : 0),
        d_bias_(plan_.needs_sums ? p_.sizes.gate_units() : 0) {}

  void run() {
    RECORD_USER_SCOPE(name_of_plan<gemm_t>(plan_));
    load_gradient_of_last(p_.grad_h_n, d_h_.data());
    load_gradient_of_last(p_.grad_c_n, d_cell_.data());
    d_preactivations_.pad(plan_.most_rows, p_.sizes.gate_units());
    std::fill_n(ones_.data(), padded_terms<gemm_t>(plan_.most_rows), gemm_t(1));
    if (!plan_.d_h0_is_one_product) {
      pack_rows_on_threads<scalar_t, gemm_t>(
          {p_.weights, p_.sizes.features()}, p_.sizes.gate_units(), weights_);
    }
    for (auto chunk = plan_.chunks.rbegin(); chunk != plan_.chunks.rend();
         ++chunk) {
      run_together(
          plan_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
            const ProductGuard<gemm_t> guard;
            run_steps(*chunk, begin, end, barrier);
          });
      gradients_of_chunk(*chunk);
    }
    // The first step that has a row of the batch is the last to write its
    // gradient.
    if (!plan_.d_h0_is_one_product) {
      store_if_wanted(d_h_, p_.d_h0, plan_.state_numel);
    }
    store_if_wanted(d_cell_, p_.d_c0, plan_.state_numel);
    if (plan_.needs_sums) {
      store_if_wanted(d_weights_, p_.d_weights, plan_.weights_numel);
      store_if_wanted(d_bias_, p_.d_bias, p_.sizes.gate_units());
    }
  }

 private:
  // The gradient of the last state waits in d_state for the step that left it.
  void load_gradient_of_last(const scalar_t* gradient, opmath_t* d_state) {
    if (gradient == nullptr) {
      std::fill_n(d_state, plan_.state_numel, opmath_t(0));
    } else {
      convert(gradient, d_state, plan_.state_numel);
    }
  }

  void
  store_if_wanted(const Scratch<opmath_t>& from, scalar_t* to, int64_t numel) {
    if (to != nullptr) {
      convert(from.data(), to, numel);
    }
  }

  // The steps of a chunk, for slots [begin, end).
  void run_steps(
      const SequenceChunk& chunk,
      int64_t begin,
      int64_t end,
      Barrier& barrier) {
    for (int64_t i = chunk.end - 1; i >= chunk.begin; --i) {
      const auto d_preactivations = d_preactivations_.matrix().part(
          p_.steps[i].first_row - chunk.first_row, 0);
      for (int64_t slot = begin; slot < end; ++slot) {
        pointwise(slot, i, d_preactivations);
      }
      if (i == 0 && p_.d_h0 == nullptr && p_.d_c0 == nullptr) {
        return;
      }
      // One barrier is enough: multiply_step() reads what all slots of its rows
      // wrote, but pointwise() reads the d_h and d_cell of its own slot alone.
      if (plan_.needs_barrier() && !barrier.wait(end - begin)) {
        return;
      }
      for (int64_t slot = begin; slot < end; ++slot) {
        if (!plan_.d_h0_is_one_product && (i > 0 || p_.d_h0 != nullptr)) {
          multiply_step(slot, i, d_preactivations);
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
            .grad_output = p_.grad_output + first,
            .grad_cells = p_.grad_cells + first,
            .cells = p_.cells + first,
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
           .B = weights_.panel(panel),
           .C = d_h.part(rows.begin, panel * plan_.units_per_panel),
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

  void gradients_of_chunk(const SequenceChunk& chunk) {
    const auto state_size = p_.sizes.state_size;
    const auto input_features = p_.sizes.input_features;
    if (plan_.needs_sums) {
      parameter_gradients(chunk, d_weights_.data(), d_bias_.data());
    } else {
      parameter_gradients(chunk, p_.d_weights, p_.d_bias);
    }
    if (p_.d_input != nullptr) {
      auto* d_input = p_.d_input + chunk.first_row * input_features;
      operand_gradient(chunk.rows, state_size, input_features, d_input);
    }
    if (plan_.d_h0_is_one_product && p_.d_h0 != nullptr) {
      operand_gradient(chunk.rows, 0, state_size, p_.d_h0);
    }
  }

  // d_operand = d_preactivations @ the columns of weights that the operand is
  // multiplied by.
  void operand_gradient(
      int64_t rows,
      int64_t first_column,
      int64_t columns,
      scalar_t* d_operand) {
    ProductOnThreads<scalar_t, gemm_t, scalar_t>{
        .M = rows,
        .N = columns,
        .K = p_.sizes.gate_units(),
        .A = d_preactivations_.matrix(),
        .B = {p_.weights + first_column, p_.sizes.features()},
        .C = {d_operand, columns}}
        .run();
  }

  // d_weights = or += d_preactivations.T @ [old_h, input], and d_bias = or +=
  // the sums of the rows of d_preactivations.
  template <typename out_t>
  void parameter_gradients(
      const SequenceChunk& chunk,
      out_t* d_weights,
      out_t* d_bias) {
    // The last chunk comes first.
    const bool accumulate = chunk.end < int64_t(p_.steps.size());
    const auto gate_units = p_.sizes.gate_units();
    if (p_.d_bias != nullptr) {
      ProductOnThreads<gemm_t, gemm_t, out_t>{
          .M = 1,
          .N = gate_units,
          .K = chunk.rows,
          .A = {ones_.data(), plan_.most_rows},
          .B = d_preactivations_.matrix(),
          .C = {d_bias, gate_units},
          .accumulate = accumulate}
          .run();
    }
    if (p_.d_weights == nullptr) {
      return;
    }
    transpose(chunk.rows);
    const auto multiply_columns =
        [&](const scalar_t* operand, int64_t first_column, int64_t columns) {
          ProductOnThreads<scalar_t, gemm_t, out_t>{
              .M = gate_units,
              .N = columns,
              .K = chunk.rows,
              .A = d_preactivations_t_.matrix(),
              .B = {operand, columns},
              .C = {d_weights + first_column, p_.sizes.features()},
              .accumulate = accumulate}
              .run();
        };
    const auto state_size = p_.sizes.state_size;
    const auto input_features = p_.sizes.input_features;
    multiply_columns(
        plan_.d_h0_is_one_product ? p_.h0 : gather_old_h(chunk), 0, state_size);
    multiply_columns(
        p_.input + chunk.first_row * input_features,
        state_size,
        input_features);
  }

  void transpose(int64_t rows) {
    constexpr int64_t at_once = 16;
    const auto gate_units = p_.sizes.gate_units();
    at::parallel_for(
        0,
        at::divup(rows, at_once),
        grain_size(at_once * gate_units / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          const auto first = begin * at_once;
          run_with_best_isa(
              Transpose<gemm_t, gemm_t>{
                  .from = d_preactivations_.matrix().part(first, 0),
                  .rows = std::min(end * at_once, rows) - first,
                  .to = d_preactivations_t_.matrix().part(0, first)},
              0,
              gate_units);
        });
    d_preactivations_t_.pad(gate_units, rows);
  }

  // The h that each row of a chunk begins with, in the order of the input.
  const scalar_t* gather_old_h(const SequenceChunk& chunk) {
    const auto size = p_.sizes.state_size;
    at::parallel_for(
        chunk.begin,
        chunk.end,
        grain_size(plan_.state_numel / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const auto& [first_row, rows, carried] = p_.steps[i];
            auto* to = old_h_.data() + (first_row - chunk.first_row) * size;
            copy_old_h(p_, i, Share(rows, 0, 1), to);
          }
        });
    return old_h_.data();
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
  const scalar_t* grad_output;
  const scalar_t* grad_cells;
  const scalar_t* cells;
  const scalar_t* gates;
  Matrix<gemm_t> d_preactivations;
  // They come from the step after this one. This step overwrites d_cell with
  // the gradient of the cell state that it begins with.
  const opmath_t* d_h;
  opmath_t* d_cell;

  // begin and end count rows.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    in_rows_of_units<opmath_t, kBytes>(*this, begin, end);
  }

  template <typename vec_t>
  C10_ALWAYS_INLINE void some_units(int64_t row, int64_t unit) const {
    const CellMath<vec_t, opmath_t> math(this->math);
    const auto at = row * state_size + unit;
    const auto* gate = gates + kGates * row * state_size + unit;
    const auto out = math.backward(
        load_opmath<vec_t>(grad_output + at) + load_opmath<vec_t>(d_h + at),
        load_opmath<vec_t>(grad_cells + at) + load_opmath<vec_t>(d_cell + at),
        lltm::tanh(load_opmath<vec_t>(cells + at)),
        load_opmath<vec_t>(gate),
        load_opmath<vec_t>(gate + state_size),
        load_opmath<vec_t>(gate + 2 * state_size));
    auto* d = d_preactivations.row(row) + unit;
    store_opmath(out.d_pre_i, d);
    store_opmath(out.d_pre_o, d + state_size);
    store_opmath(out.d_pre_g, d + 2 * state_size);
    store_opmath(out.d_old_cell, d_cell + at);
  }
};

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("backward", as_kernel<backward_kernel>());
  m.impl("sequence_backward", as_kernel<sequence_backward_kernel>());
}

} // namespace lltm
