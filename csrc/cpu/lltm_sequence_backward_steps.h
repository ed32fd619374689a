#pragma once

#include "cpu/lltm_gates_backward.h"
#include "cpu/lltm_gradients.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/lltm_sequence_team.h"
#include "cpu/primitives/barrier.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/scratch.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

// Backward of a sequence, and of a cell, which is a sequence of one step: the
// gradients of the gates, step by step, then the products of lltm_gradients.h.
namespace lltm {

// On raw pointers to contiguous memory; batch is that of h0.
template <typename scalar_t>
struct BackwardPointers {
  CellSizes sizes;
  CellMath<at::opmath_type<scalar_t>> math;
  GradientPointers<scalar_t> gradients;
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

// The gradients of the gates, from the last step of a chunk to its first. The
// gradients of the state go on to the chunk before.
template <typename scalar_t, typename gemm_t>
class BackwardRecurrence {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  explicit BackwardRecurrence(const BackwardPointers<scalar_t>& pointers)
      : a_(pointers),
        team_(a_, units_, multiplies_ ? 2 * kGates * a_.sizes.state_size : 0),
        weights_(
            a_.sizes.gate_units(),
            multiplies_ ? a_.sizes.state_size : 0,
            units_),
        d_h_(size_),
        d_cell_(size_) {
    begin_with(a_.grad_h_n, d_h_.data());
    begin_with(a_.grad_c_n, d_cell_.data());
    if (multiplies_) {
      weights_.template pack_on_threads<scalar_t>(
          {a_.weights, a_.sizes.features()}, a_.sizes.gate_units());
    }
  }

  // d_gates [chunk.rows, gate_units], with zeros up to Product::padded_terms().
  void run(const SequenceChunk& chunk, Matrix<gemm_t> d_gates) const {
    run_together(
        team_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
          const typename Product<gemm_t>::Guard guard;
          run(chunk, d_gates, begin, end, barrier);
        });
  }

  // The gradients of h0 and c0, which remain after all steps: the first step
  // that has a row of the batch is the last to write its gradient.
  const opmath_t* d_h() const {
    return d_h_.data();
  }

  const opmath_t* d_cell() const {
    return d_cell_.data();
  }

 private:
  // The gradients of the last state wait here for the step that made it.
  void begin_with(const scalar_t* gradient, opmath_t* state) const {
    if (gradient == nullptr) {
      std::fill_n(state, size_, opmath_t(0));
    } else {
      convert(gradient, state, size_);
    }
  }

  void run(
      const SequenceChunk& chunk,
      Matrix<gemm_t> d_gates,
      int64_t begin,
      int64_t end,
      Barrier& barrier) const {
    for (int64_t step = chunk.end - 1; step >= chunk.begin; --step) {
      const auto d_gates_of_step =
          d_gates.part(a_.steps[step].first_row - chunk.first_row, 0);
      for (int64_t slot = begin; slot < end; ++slot) {
        pointwise(slot, step, d_gates_of_step);
      }
      if (step == 0 && a_.gradients.d_old_h == nullptr &&
          a_.gradients.d_old_cell == nullptr) {
        return;
      }
      // One barrier is enough: multiply_step() reads the d_gates of all slots,
      // but pointwise() reads the d_h and d_cell of its own alone.
      if (team_.needs_barrier() && !barrier.wait(end - begin)) {
        return;
      }
      for (int64_t slot = begin; slot < end; ++slot) {
        if (multiplies_ && (step > 0 || a_.gradients.d_old_h != nullptr)) {
          multiply_step(slot, step, d_gates_of_step);
        }
        reset(slot, step);
      }
    }
  }

  void pointwise(int64_t slot, int64_t step, Matrix<gemm_t> d_gates) const {
    const auto rows = team_.rows(slot, a_.steps[step].rows);
    const auto units = team_.units(slot);
    const auto first = a_.steps[step].first_row * a_.sizes.state_size;
    vectorized(
        GatesBackward<scalar_t, gemm_t>{
            .state_size = a_.sizes.state_size,
            .math = a_.math,
            .first_unit = units.begin,
            .end_unit = units.end,
            .grad_h = a_.grad_output + first,
            .grad_cell = a_.grad_cells + first,
            .new_cell = a_.cells + first,
            .gates = a_.gates + kGates * first,
            .d_gates = d_gates,
            .d_h = d_h_.data(),
            .d_cell = d_cell_.data()},
        rows.begin,
        rows.end);
  }

  // d_h = d_gates @ columns of weights.
  void multiply_step(int64_t slot, int64_t step, Matrix<const gemm_t> d_gates)
      const {
    const auto rows = team_.rows(slot, a_.steps[step].rows);
    const Matrix<opmath_t> d_h{d_h_.data(), a_.sizes.state_size};
    team_.for_each_panel(slot, step, [&](int64_t panel) {
      const auto unit = panel * units_;
      multiply<gemm_t>(
          {.M = rows.size(),
           .N = std::min(units_, a_.sizes.state_size - unit),
           .K = weights_.terms(),
           .A = d_gates.part(rows.begin, 0),
           .B = weights_.panel(panel),
           .C = d_h.part(rows.begin, unit),
           .accumulate = false,
           .several_chains = a_.sizes.batch <= 2});
    });
  }

  // No gradient passes a reset.
  void reset(int64_t slot, int64_t step) const {
    const auto rows = team_.rows(slot, a_.steps[step].rows);
    for (auto* states : {d_h_.data(), d_cell_.data()}) {
      a_.resets.template zero<opmath_t>(
          a_.steps[step],
          rows,
          team_.units(slot),
          {states, a_.sizes.state_size});
    }
  }

  const BackwardPointers<scalar_t>& a_;
  const int64_t size_ = a_.sizes.batch * a_.sizes.state_size;
  const bool multiplies_ = !a_.is_one_step();
  // A panel has so many units.
  const int64_t units_ = Product<gemm_t>::panel_width(a_.sizes.state_size);
  const Team<gemm_t> team_;
  const Panels<gemm_t> weights_;
  const Scratch<opmath_t> d_h_;
  const Scratch<opmath_t> d_cell_;
};

// Chunks of steps from the last to the first: the recurrence, then the products
// of all its rows at once.
template <typename scalar_t, typename gemm_t>
class Backward {
 public:
  explicit Backward(const BackwardPointers<scalar_t>& pointers)
      : a_(pointers),
        chunks_(sequence_chunks(a_.steps, kRowsOfAChunk)),
        d_weights_(
            a_.gradients.d_weights,
            gate_units_ * a_.sizes.features(),
            chunks_.size() > 1),
        d_bias_(a_.gradients.d_bias, gate_units_, chunks_.size() > 1) {}

  void run() {
    const BackwardRecurrence<scalar_t, gemm_t> recurrence(a_);
    const GateGradients<gemm_t> d_gates(
        most_rows(chunks_), gate_units_, a_.gradients.d_weights != nullptr);
    const Scratch<scalar_t> old_h(
        a_.gradients.d_weights == nullptr || a_.is_one_step()
            ? 0
            : most_rows(chunks_) * a_.sizes.state_size);
    for (auto chunk = chunks_.rbegin(); chunk != chunks_.rend(); ++chunk) {
      recurrence.run(*chunk, d_gates.rows());
      multiply(*chunk, d_gates, old_h.data(), chunk != chunks_.rbegin());
    }
    const auto state = a_.sizes.batch * a_.sizes.state_size;
    d_weights_.write();
    d_bias_.write();
    if (!a_.is_one_step()) {
      write(recurrence.d_h(), a_.gradients.d_old_h, state);
    }
    write(recurrence.d_cell(), a_.gradients.d_old_cell, state);
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  // There are many rows, because each chunk reads and writes d_weights once.
  static constexpr int64_t kRowsOfAChunk = 1024;

  static void write(const opmath_t* from, scalar_t* to, int64_t size) {
    if (to != nullptr) {
      convert(from, to, size);
    }
  }

  // A gradient that adds up over chunks, in opmath_t. It has memory of its own
  // if there are several and the result has another type.
  struct Sum {
    Sum(scalar_t* result, int64_t size, bool has_chunks)
        : result(result),
          size(size),
          scratch(kInPlace || result == nullptr || !has_chunks ? 0 : size) {}

    // Calls f(where to add).
    template <typename F>
    void add(const F& f) const {
      if (result == nullptr) {
      } else if (scratch.data() == nullptr) {
        f(result);
      } else {
        f(scratch.data());
      }
    }

    void write() const {
      if (scratch.data() != nullptr) {
        Backward::write(scratch.data(), result, size);
      }
    }

    static constexpr bool kInPlace = std::is_same_v<scalar_t, opmath_t>;
    scalar_t* const result; // null: not wanted
    const int64_t size;
    const Scratch<opmath_t> scratch;
  };

  void multiply(
      const SequenceChunk& chunk,
      const GateGradients<gemm_t>& d_gates,
      scalar_t* old_h_scratch,
      bool accumulate) const {
    // The rows of a chunk take the place of a batch.
    const CellSizes sizes{
        chunk.rows, a_.sizes.input_features, a_.sizes.state_size};
    d_bias_.add([&](auto* d_bias) {
      bias_gradient(sizes, d_gates, d_bias, accumulate);
    });
    const auto* input = a_.input + chunk.first_row * a_.sizes.input_features;
    d_weights_.add([&](auto* d_weights) {
      d_gates.transpose(chunk.rows);
      const auto* h = gather_old_h(chunk, old_h_scratch);
      weights_gradient(sizes, d_gates, h, input, d_weights, accumulate);
    });
    if (a_.is_one_step() && a_.gradients.d_old_h != nullptr) {
      operand_gradient(
          sizes,
          d_gates,
          a_.weights,
          a_.sizes.state_size,
          a_.gradients.d_old_h);
    }
    if (a_.gradients.d_input != nullptr) {
      operand_gradient(
          sizes,
          d_gates,
          a_.weights + a_.sizes.state_size,
          a_.sizes.input_features,
          a_.gradients.d_input + chunk.first_row * a_.sizes.input_features);
    }
  }

  // The h that each row of a chunk begins with, in the order of the input.
  const scalar_t* gather_old_h(const SequenceChunk& chunk, scalar_t* scratch)
      const {
    if (a_.is_one_step()) {
      return a_.h0;
    }
    at::parallel_for(
        chunk.begin,
        chunk.end,
        grain_size(a_.sizes.batch * a_.sizes.state_size / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t step = begin; step < end; ++step) {
            const auto& [first_row, rows, carried] = a_.steps[step];
            auto* to =
                scratch + (first_row - chunk.first_row) * a_.sizes.state_size;
            const auto* from = old_h<scalar_t>(a_, step, Part(rows, 0, 1), to);
            if (from != to) {
              std::copy_n(from, rows * a_.sizes.state_size, to);
            }
          }
        });
    return scratch;
  }

  const BackwardPointers<scalar_t>& a_;
  const int64_t gate_units_ = a_.sizes.gate_units();
  const std::vector<SequenceChunk> chunks_;
  const Sum d_weights_;
  const Sum d_bias_;
};

template <typename scalar_t>
void backward_steps(const BackwardPointers<scalar_t>& pointers) {
  constexpr bool pairs_fit = true; // odd sizes are padded with zeros
  with_gemm_type<scalar_t>(pairs_fit, [&](auto gemm) {
    Backward<scalar_t, decltype(gemm)>(pointers).run();
  });
}

} // namespace lltm
