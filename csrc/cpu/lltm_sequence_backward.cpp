#include "cpu/lltm_sequence_backward.h"

#include "cpu/choices.h"
#include "cpu/lltm_gradients.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/primitives/convert.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/gemm_of_rows.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/profiled_path.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/team.h"
#include "cpu/primitives/vectorize.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace lltm {

namespace {

// The pointwise part of a step, for units [first, last) of rows.
template <typename scalar_t, typename gemm_t>
struct SequenceBackwardRows {
  using opmath_t = at::opmath_type<scalar_t>;

  int64_t state_size;
  int64_t first;
  int64_t last;
  const scalar_t* grad_output;
  const scalar_t* grad_cells;
  const scalar_t* cells;
  const scalar_t* gates;
  gemm_t* d_gates;
  int64_t ld_d_gates;
  const opmath_t* d_h; // from the step after this one
  opmath_t* d_cell;    // likewise, then for the step before

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      const auto at = row * state_size;
      compute(
          grad_output + at,
          grad_cells + at,
          cells + at,
          gates + 3 * at,
          d_gates + row * ld_d_gates,
          d_h + at,
          d_cell + at);
    }
  }

  C10_ALWAYS_INLINE void compute(
      const scalar_t* __restrict__ grad_output,
      const scalar_t* __restrict__ grad_cells,
      const scalar_t* __restrict__ cells,
      const scalar_t* __restrict__ gates,
      gemm_t* __restrict__ d_gates,
      const opmath_t* __restrict__ d_h,
      opmath_t* __restrict__ d_cell) const {
    for (int64_t i = first; i < last; ++i) {
      const auto out = cell_backward<opmath_t>(
          load(grad_output[i]) + d_h[i],
          load(grad_cells[i]) + d_cell[i],
          load(cells[i]),
          load(gates[i]),
          load(gates[i + state_size]),
          load(gates[i + 2 * state_size]));
      store(out.d_input_gate, d_gates[i]);
      store(out.d_output_gate, d_gates[i + state_size]);
      store(out.d_candidate, d_gates[i + 2 * state_size]);
      d_cell[i] = out.d_old_cell;
    }
  }
};

// The gradients of the gates, from the last step of a chunk to its first. The
// gradients of the state go on to the chunk before.
template <typename scalar_t, typename gemm_t>
class SequenceBackwardRecurrence {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  explicit SequenceBackwardRecurrence(
      const SequenceBackwardPointers<scalar_t>& pointers)
      : a_(pointers),
        panels_(at::divup(a_.state_size, width_)),
        shape_(shape()),
        weights_(packs_ ? panels_ * width_ * size_k_ : 0),
        d_h_(a_.batch * a_.state_size),
        d_cell_(a_.batch * a_.state_size) {
    std::fill_n(d_h_.data(), a_.batch * a_.state_size, opmath_t(0));
    std::fill_n(d_cell_.data(), a_.batch * a_.state_size, opmath_t(0));
    pack();
  }

  // d_gates [chunk.rows, ld].
  void run(const SequenceChunk& chunk, gemm_t* d_gates) const {
    run_team(shape_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
      run(chunk, d_gates, begin, end, barrier);
      release_gemm<gemm_t>();
    });
  }

  // What remains after all steps: the gradients of h0 and c0.
  const opmath_t* d_h() const {
    return d_h_.data();
  }

  const opmath_t* d_cell() const {
    return d_cell_.data();
  }

 private:
  static constexpr bool kConverts =
      !std::is_same_v<scalar_t, gemm_t> || kPair<gemm_t> == 2;

  TeamShape shape() const {
    const auto nanoseconds = a_.batch * a_.state_size *
        (6 * a_.state_size / kFlopPerNanosecond + kNanosecondsOfGatesBackward);
    const auto weight_bytes =
        3 * a_.state_size * a_.state_size * int64_t(sizeof(gemm_t));
    return team_shape(
        nanoseconds,
        a_.steps.size(),
        max_row_groups(a_.packed, a_.batch, weight_bytes),
        panels_);
  }

  const gemm_t* panel(int64_t i) const {
    return weights_.data() + i * width_ * size_k_;
  }

  // The columns of weights for old_h, in panels [size_k, width].
  void pack() const {
    if (!packs_) {
      return;
    }
    at::parallel_for(
        0,
        panels_,
        grain_size(width_ * size_k_ / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const auto unit = i * width_;
            vectorized<PackRows<scalar_t, gemm_t>>()(
                {a_.weights + unit,
                 a_.features(),
                 3 * a_.state_size,
                 std::min(width_, a_.state_size - unit),
                 weights_.data() + i * width_ * size_k_,
                 width_},
                0,
                size_k_ / kPair<gemm_t>);
          }
        });
  }

  void run(
      const SequenceChunk& chunk,
      gemm_t* d_gates,
      int64_t begin,
      int64_t end,
      Barrier& barrier) const {
    for (int64_t step = chunk.end - 1; step >= chunk.begin; --step) {
      auto* d_gates_of_step =
          d_gates + (a_.steps[step].first_row - chunk.first_row) * ld_;
      for (int64_t i = begin; i < end; ++i) {
        pointwise(rows_of(i, step), panels_of(i), step, d_gates_of_step);
      }
      if (step == 0 && a_.d_h0 == nullptr && a_.d_c0 == nullptr) {
        return;
      }
      if (shape_.unit_groups > 1 && !barrier.wait(end - begin)) {
        return;
      }
      for (int64_t i = begin; i < end; ++i) {
        multiply(rows_of(i, step), panels_of(i), step, d_gates_of_step);
        reset(rows_of(i, step), panels_of(i), step);
      }
    }
  }

  Part rows_of(int64_t slot, int64_t step) const {
    return shape_.rows(slot, a_.batch, a_.steps[step].rows);
  }

  Part panels_of(int64_t slot) const {
    return shape_.panels(slot, panels_);
  }

  void pointwise(
      const Part& rows,
      const Part& panels,
      int64_t step,
      gemm_t* d_gates) const {
    const auto first = a_.steps[step].first_row * a_.state_size;
    vectorized<SequenceBackwardRows<scalar_t, gemm_t>>()(
        {a_.state_size,
         panels.begin * width_,
         std::min(panels.end * width_, a_.state_size),
         a_.grad_output + first,
         a_.grad_cells + first,
         a_.cells + first,
         a_.gates + 3 * first,
         d_gates,
         ld_,
         d_h_.data(),
         d_cell_.data()},
        rows.begin,
        rows.end);
  }

  // d_h = d_gates @ columns of weights.
  void multiply(
      const Part& rows,
      const Part& panels,
      int64_t step,
      const gemm_t* d_gates) const {
    if (rows.size() <= 0) {
      return;
    }
    for (int64_t j = 0; j < panels.size(); ++j) {
      const auto i = panels.begin + block_in_turn(step, j, panels.size());
      const auto unit = i * width_;
      const auto units = std::min(width_, a_.state_size - unit);
      const auto* A = d_gates + rows.begin * ld_;
      auto* C = d_h_.data() + rows.begin * a_.state_size + unit;
      if constexpr (kPair<gemm_t> == 2) {
        for (int64_t k = 0; k < size_k_; k += kMaxK<gemm_t>) {
          gemm_of_rows<gemm_t>(
              rows.size(),
              units,
              std::min(kMaxK<gemm_t>, size_k_ - k),
              A + k,
              ld_,
              panel(i) + k * width_,
              width_,
              C,
              a_.state_size,
              k > 0);
        }
      } else {
        const gemm_t* B = panel(i);
        if constexpr (!kConverts) {
          B = packs_ ? B : a_.weights + unit;
        }
        lltm::multiply<gemm_t>(
            rows.size(),
            units,
            size_k_,
            A,
            ld_,
            B,
            packs_ ? width_ : a_.features(),
            C,
            a_.state_size,
            false,
            a_.batch,
            packs_);
      }
    }
  }

  // No gradient passes a reset.
  void reset(const Part& rows, const Part& panels, int64_t step) const {
    if (a_.resets == nullptr) {
      return;
    }
    const auto first = panels.begin * width_;
    const auto units = std::min(panels.end * width_, a_.state_size) - first;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (a_.resets[a_.steps[step].first_row + row] != 0) {
        const auto at = row * a_.state_size + first;
        std::fill_n(d_h_.data() + at, units, opmath_t(0));
        std::fill_n(d_cell_.data() + at, units, opmath_t(0));
      }
    }
  }

  const SequenceBackwardPointers<scalar_t>& a_;
  const int64_t ld_ = leading_dimension<gemm_t>(3 * a_.state_size);
  const int64_t size_k_ = kPair<gemm_t> == 2
      ? terms_of<gemm_t>(3 * a_.state_size)
      : 3 * a_.state_size;
  const bool packs_ =
      kConverts || a_.steps.size() >= kStepsWorthPackingBackward;
  const int64_t width_ = kPair<gemm_t> == 2
      ? backward_panel(a_.state_size)
      : 3 * vector_bytes() / int64_t(sizeof(gemm_t));
  const int64_t panels_;
  const TeamShape shape_;
  const Scratch<gemm_t> weights_;
  const Scratch<opmath_t> d_h_;
  const Scratch<opmath_t> d_cell_;
};

// Chunks of steps from the last to the first: the recurrence, then the products
// of all its rows at once.
template <typename scalar_t, typename gemm_t>
class SequenceBackward {
 public:
  explicit SequenceBackward(const SequenceBackwardPointers<scalar_t>& pointers)
      : a_(pointers),
        old_h_{a_.steps, a_.state_size, a_.output, a_.h0, {a_.resets}},
        chunks_(sequence_chunks(a_.steps, kRowsOfABackwardChunk)) {}

  void run() {
    SequenceBackwardRecurrence<scalar_t, gemm_t> recurrence(a_);
    const Sums sums(a_);
    const auto units = 3 * a_.state_size;
    const auto most = most_rows(chunks_);
    const Scratch<gemm_t> rows(most * leading_dimension<gemm_t>(units));
    const Scratch<gemm_t> columns(
        wants_columns_ ? units * leading_dimension<gemm_t>(most) : 0);
    const Scratch<scalar_t> old_h(
        a_.d_weights == nullptr ? 0 : rows_to_gather() * a_.state_size);
    for (auto chunk = chunks_.rbegin(); chunk != chunks_.rend(); ++chunk) {
      const GateGradients<gemm_t> d_gates{
          chunk->rows, units, rows.data(), columns.data()};
      d_gates.zero_padding();
      recurrence.run(*chunk, rows.data());
      multiply(*chunk, d_gates, old_h.data(), sums, chunk != chunks_.rbegin());
    }
    finish(sums.d_weights, a_.d_weights, units * a_.features());
    finish(sums.d_bias, a_.d_bias, units);
    finish(recurrence.d_h(), a_.d_h0, a_.batch * a_.state_size);
    finish(recurrence.d_cell(), a_.d_c0, a_.batch * a_.state_size);
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;

  // Gradients that add up over chunks, in opmath_t.
  struct Sums {
    explicit Sums(const SequenceBackwardPointers<scalar_t>& a)
        : weights_scratch(
              in_place || a.d_weights == nullptr
                  ? 0
                  : 3 * a.state_size * a.features()),
          bias_scratch(in_place || a.d_bias == nullptr ? 0 : 3 * a.state_size),
          d_weights(target(a.d_weights, weights_scratch)),
          d_bias(target(a.d_bias, bias_scratch)) {}

    static opmath_t* target(
        scalar_t* wanted,
        const Scratch<opmath_t>& scratch) {
      if constexpr (in_place) {
        return wanted;
      } else {
        return scratch.data();
      }
    }

    static constexpr bool in_place = std::is_same_v<scalar_t, opmath_t>;
    const Scratch<opmath_t> weights_scratch;
    const Scratch<opmath_t> bias_scratch;
    opmath_t* const d_weights;
    opmath_t* const d_bias;
  };

  static void finish(const opmath_t* from, scalar_t* to, int64_t size) {
    if (to == nullptr || static_cast<const void*>(from) == to) {
      return;
    }
    at::parallel_for(
        0,
        size,
        grain_size(1) * kPackedPerNanosecond,
        [&](int64_t begin, int64_t end) {
          const auto part = end - begin;
          vectorized<ConvertRows<opmath_t, scalar_t>>()(
              {from + begin, part, part, to + begin, part}, 0, 1);
        });
  }

  void multiply(
      const SequenceChunk& chunk,
      const GateGradients<gemm_t>& d_gates,
      scalar_t* old_h_scratch,
      const Sums& sums,
      bool accumulate) const {
    const CellSizes sizes{chunk.rows, a_.input_features, a_.state_size};
    if (wants_columns_) {
      transpose_columns(d_gates);
    }
    if (sums.d_bias != nullptr) {
      bias_gradient(d_gates, sums.d_bias, accumulate);
    }
    const auto* input = a_.input + chunk.first_row * a_.input_features;
    if (sums.d_weights != nullptr) {
      const auto* h = old_h(chunk, old_h_scratch);
      weights_gradient(sizes, d_gates, h, input, sums.d_weights, accumulate);
    }
    if (a_.d_input != nullptr) {
      rows_gradient(
          sizes,
          d_gates,
          a_.weights + a_.state_size,
          a_.input_features,
          a_.d_input + chunk.first_row * a_.input_features);
    }
  }

  static void transpose_columns(const GateGradients<gemm_t>& d_gates) {
    at::parallel_for(
        0,
        at::divup(d_gates.batch, kVector),
        grain_size(kVector * d_gates.units / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          const auto first = begin * kVector;
          const auto rows = std::min(end * kVector, d_gates.batch) - first;
          vectorized<PackTransposed<gemm_t, gemm_t>>()(
              {d_gates.rows + first * d_gates.ld_rows,
               d_gates.ld_rows,
               rows,
               rows,
               d_gates.columns + first,
               d_gates.ld_columns},
              0,
              d_gates.units);
        });
  }

  // The states that the rows of a chunk begin with lie together.
  bool lie_together(const SequenceChunk& chunk) const {
    return !a_.packed && a_.resets == nullptr && chunk.begin > 0;
  }

  int64_t rows_to_gather() const {
    int64_t rows = 0;
    for (const auto& chunk : chunks_) {
      rows = std::max(rows, lie_together(chunk) ? 0 : chunk.rows);
    }
    return rows;
  }

  // The rows of a chunk, in the order of the input.
  const scalar_t* old_h(const SequenceChunk& chunk, scalar_t* scratch) const {
    if (lie_together(chunk)) {
      // In reverse, a step lies in memory before the step that ran before it.
      const auto first = std::min(
          a_.steps[chunk.begin - 1].first_row,
          a_.steps[chunk.end - 2].first_row);
      return a_.output + first * a_.state_size;
    }
    at::parallel_for(
        chunk.begin,
        chunk.end,
        grain_size(a_.batch * a_.state_size / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t step = begin; step < end; ++step) {
            const auto& [first_row, rows, carried] = a_.steps[step];
            auto* to = scratch + (first_row - chunk.first_row) * a_.state_size;
            const auto* from =
                old_h_.template rows<scalar_t>(step, 0, rows, to);
            if (from != to) {
              std::copy_n(from, rows * a_.state_size, to);
            }
          }
        });
    return scratch;
  }

  const SequenceBackwardPointers<scalar_t>& a_;
  const OldStates<scalar_t> old_h_;
  const std::vector<SequenceChunk> chunks_;
  const bool wants_columns_ = a_.d_weights != nullptr || a_.d_bias != nullptr;
};

} // namespace

template <typename scalar_t>
void sequence_backward_steps(
    const SequenceBackwardPointers<scalar_t>& pointers) {
  if constexpr (kPair<scalar_t> == 2) {
    if (has_bfloat16_gemm()) {
      const ProfiledPath path("lltm::sequence_backward_gemm_bfloat16");
      return SequenceBackward<scalar_t, scalar_t>(pointers).run();
    }
  }
  const ProfiledPath path("lltm::sequence_backward_gemm");
  SequenceBackward<scalar_t, at::opmath_type<scalar_t>>(pointers).run();
}

template void sequence_backward_steps(const SequenceBackwardPointers<double>&);
template void sequence_backward_steps(const SequenceBackwardPointers<float>&);
template void sequence_backward_steps(
    const SequenceBackwardPointers<c10::Half>&);
template void sequence_backward_steps(
    const SequenceBackwardPointers<c10::BFloat16>&);

} // namespace lltm
