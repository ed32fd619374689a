#pragma once

#include "cpu/cell_sizes.h"
#include "cpu/lltm_empty_gradients.h"
#include "cpu/lltm_gates.h"
#include "cpu/lltm_gradients.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/team.h"
#include "cpu/primitives/vectorize.h"
#include "cpu/primitives/work.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace lltm {

// With fewer steps, backward takes the rows of weights as they lie. Measured on
// Zen 5.
constexpr size_t kStepsWorthPackingBackward = 5;

// Units of a panel in backward if pairs are multiplied. They depend on the size
// alone, so that results do not depend on the number of threads.
constexpr int64_t backward_panel(int64_t state_size) {
  return state_size >= 512 ? 64 : 32;
}

// On raw pointers to contiguous memory; batch is that of h0.
template <typename scalar_t>
struct SequenceBackwardPointers {
  CellSizes sizes;
  GradientPointers<scalar_t> gradients;
  const std::vector<SequenceStep>& steps;
  bool packed;
  const scalar_t* grad_output;
  const scalar_t* grad_cells;
  const scalar_t* output;
  const scalar_t* cells;
  const scalar_t* gates;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* h0;
  Resets resets;
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
        panels_(at::divup(a_.sizes.state_size, units_)),
        shape_(shape()),
        weights_(packs_ ? panels_ * units_ * size_k_ : 0),
        d_h_(a_.sizes.batch * a_.sizes.state_size),
        d_cell_(a_.sizes.batch * a_.sizes.state_size) {
    std::fill_n(d_h_.data(), a_.sizes.batch * a_.sizes.state_size, opmath_t(0));
    std::fill_n(
        d_cell_.data(), a_.sizes.batch * a_.sizes.state_size, opmath_t(0));
    pack();
  }

  // d_gates [chunk.rows, 3 * state_size], with zeros up to size_k_ columns,
  // which zero_padding() has written.
  void run(const SequenceChunk& chunk, Matrix<gemm_t> d_gates) const {
    run_team(shape_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
      run(chunk, d_gates, begin, end, barrier);
      release_gemm<gemm_t>();
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
  static constexpr bool kAlwaysPacks =
      !std::is_same_v<scalar_t, gemm_t> || kPair<gemm_t> == 2;
  static constexpr auto kMethod =
      kPair<gemm_t> == 2 ? Method::kOneDNN : Method::kTile;

  TeamShape shape() const {
    const auto nanoseconds = a_.sizes.batch * a_.sizes.state_size *
        (6 * a_.sizes.state_size / kFlopPerNanosecond +
         kNanosecondsOfGatesBackward);
    return shape_for_steps<gemm_t>(a_, nanoseconds, panels_);
  }

  Matrix<gemm_t> packed(int64_t panel) const {
    return {weights_.data() + panel * units_ * size_k_, units_};
  }

  // The columns of weights for the units of a panel.
  Matrix<const gemm_t> panel(int64_t i) const {
    if constexpr (!kAlwaysPacks) {
      if (!packs_) {
        return {a_.weights + i * units_, a_.sizes.features()};
      }
    }
    return packed(i);
  }

  // The columns of weights for old_h, in panels [size_k_, units_].
  void pack() const {
    if (!packs_) {
      return;
    }
    at::parallel_for(
        0,
        panels_,
        grain_size(units_ * size_k_ / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            const auto unit = i * units_;
            vectorized<PackRows<scalar_t, gemm_t>>(
                {.from = {a_.weights + unit, a_.sizes.features()},
                 .rows = 3 * a_.sizes.state_size,
                 .columns = std::min(units_, a_.sizes.state_size - unit),
                 .to = packed(i)},
                0,
                size_k_ / kPair<gemm_t>);
          }
        });
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
        pointwise(rows_of(slot, step), panels_of(slot), step, d_gates_of_step);
      }
      if (step == 0 && a_.gradients.d_old_h == nullptr &&
          a_.gradients.d_old_cell == nullptr) {
        return;
      }
      // One barrier is enough: multiply() reads the d_gates of all slots, but
      // pointwise() reads the d_h and d_cell of its own alone.
      if (shape_.unit_groups > 1 && !barrier.wait(end - begin)) {
        return;
      }
      for (int64_t slot = begin; slot < end; ++slot) {
        multiply(rows_of(slot, step), panels_of(slot), step, d_gates_of_step);
        reset(rows_of(slot, step), panels_of(slot), step);
      }
    }
  }

  Part rows_of(int64_t slot, int64_t step) const {
    return shape_.rows(slot, a_.sizes.batch, a_.steps[step].rows);
  }

  Part panels_of(int64_t slot) const {
    return shape_.panels(slot, panels_);
  }

  void pointwise(
      const Part& rows,
      const Part& panels,
      int64_t step,
      Matrix<gemm_t> d_gates) const {
    const auto first = a_.steps[step].first_row * a_.sizes.state_size;
    vectorized<GatesBackward<scalar_t, gemm_t, opmath_t>>(
        {.state_size = a_.sizes.state_size,
         .first_unit = panels.begin * units_,
         .end_unit = std::min(panels.end * units_, a_.sizes.state_size),
         .grad_h = a_.grad_output + first,
         .grad_cell = a_.grad_cells + first,
         .new_cell = a_.cells + first,
         .gates = a_.gates + 3 * first,
         .d_gates = d_gates,
         .d_h = d_h_.data(),
         .d_cell = d_cell_.data()},
        rows.begin,
        rows.end);
  }

  // d_h = d_gates @ columns of weights.
  void multiply(
      const Part& rows,
      const Part& panels,
      int64_t step,
      Matrix<const gemm_t> d_gates) const {
    const Matrix<opmath_t> d_h{d_h_.data(), a_.sizes.state_size};
    for (int64_t j = 0; j < panels.size(); ++j) {
      const auto i = panels.begin + panel_in_turn(step, j, panels.size());
      const auto unit = i * units_;
      gemm<gemm_t>(
          kMethod,
          {.M = rows.size(),
           .N = std::min(units_, a_.sizes.state_size - unit),
           .K = size_k_,
           .A = d_gates.part(rows.begin, 0),
           .B = panel(i),
           .C = d_h.part(rows.begin, unit),
           .accumulate = false,
           .all_rows = a_.sizes.batch,
           .chain = chain_of(a_.sizes.batch, packs_)});
    }
  }

  // No gradient passes a reset.
  void reset(const Part& rows, const Part& panels, int64_t step) const {
    if (a_.resets.data == nullptr) {
      return;
    }
    const auto first = panels.begin * units_;
    const auto units =
        std::min(panels.end * units_, a_.sizes.state_size) - first;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      if (a_.resets.any(a_.steps[step], row, row + 1)) {
        const auto at = row * a_.sizes.state_size + first;
        std::fill_n(d_h_.data() + at, units, opmath_t(0));
        std::fill_n(d_cell_.data() + at, units, opmath_t(0));
      }
    }
  }

  const SequenceBackwardPointers<scalar_t>& a_;
  // A product has so many terms. Pairs are padded with zeros.
  const int64_t size_k_ = kPair<gemm_t> == 2
      ? terms_of<gemm_t>(3 * a_.sizes.state_size)
      : 3 * a_.sizes.state_size;
  const bool packs_ =
      kAlwaysPacks || a_.steps.size() >= kStepsWorthPackingBackward;
  // A panel has so many units. The tile takes three vectors at once.
  const int64_t units_ = kPair<gemm_t> == 2
      ? backward_panel(a_.sizes.state_size)
      : 3 * vector_bytes() / int64_t(sizeof(gemm_t));
  const int64_t panels_;
  const TeamShape shape_;
  const Scratch<gemm_t> weights_;
  const Scratch<opmath_t> d_h_;
  const Scratch<opmath_t> d_cell_;
};

} // namespace lltm
