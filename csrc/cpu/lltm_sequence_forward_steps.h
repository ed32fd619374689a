#pragma once

#include "cpu/cell_sizes.h"
#include "cpu/lltm_gates.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/dot.h"
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
#include <limits>
#include <type_traits>
#include <vector>

namespace lltm {

// On raw pointers to contiguous memory; batch is that of h0.
template <typename scalar_t>
struct SequenceForwardPointers {
  CellSizes sizes;
  const std::vector<SequenceStep>& steps;
  bool packed;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* bias;
  OldH<scalar_t> old_h;
  CellStates<scalar_t> cell_states;
  scalar_t* output;
  scalar_t* cells;
  scalar_t* gates; // null: not wanted

  // Returns what the gates of a step's rows need, of which units [first_unit,
  // end_unit) are computed. In rows that the step resets, these units of
  // old_cell become zero.
  CellPointers<scalar_t> cell_pointers(
      int64_t i,
      const Part& rows,
      int64_t first_unit,
      int64_t end_unit,
      const at::opmath_type<scalar_t>* bias) const {
    const auto size = sizes.state_size;
    const auto at = (steps[i].first_row + rows.begin) * size;
    return {
        .state_size = size,
        .bias = bias,
        .old_cell = cell_states.before(i, rows, first_unit, end_unit),
        .next_cell = cell_states.after(i, rows),
        .new_h = output + at,
        .new_cell = cells + at,
        .gates = gates == nullptr ? nullptr : gates + 3 * at};
  }
};

// Rows of a step that a panel is multiplied with at a time. Their operands and
// products fit in the caches, in which pairs take half the room.
template <typename gemm_t>
constexpr int64_t kMaxRowsOfABlock = 64 * kPair<gemm_t>;
// With fewer rows of the batch, the products with the input are made for many
// steps at once, so each step reads only the weights for h. AMX also takes time
// to change the shape of a product: 77x12x96x192 in bfloat16 takes 9 % less
// time on the Xeon.
template <typename gemm_t>
constexpr int64_t kMinRowsToMultiplyInputInSteps = kPair<gemm_t> == 2 ? 32 : 8;

// products = [old_h, input] @ weights.T, by panels of the weights of some
// hidden units, which are packed once, [features, 3, units], or read as they
// lie. The products of a panel become gates and new states while they are in
// the cache.
template <typename scalar_t, typename gemm_t>
class SequenceForward {
 public:
  SequenceForward(const SequenceForwardPointers<scalar_t>& pointers, bool packs)
      : a_(pointers),
        packs_(packs),
        shape_(shape()),
        multiplies_input_first_(
            a_.sizes.input_features > 0 &&
            a_.sizes.batch < kMinRowsToMultiplyInputInSteps<gemm_t>),
        chunks_(sequence_chunks(a_.steps, max_chunk_rows())),
        bias_(a_.bias, 3 * a_.sizes.state_size),
        weights_(packs_ ? panels_ * width_ * a_.sizes.features() : 0),
        products_(shape_.slots() * products_per_slot()),
        old_h_(shape_.slots() * old_h_per_slot()),
        input_(kConverts ? shape_.slots() * input_per_slot() : 0) {}

  void run() const {
    run_team(shape_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
      run(begin, end, barrier);
      release_gemm<gemm_t>();
    });
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;
  // Each step is one block of rows where products with the input are kept.
  // products_of() would have to skip the rows of other blocks.
  static_assert(
      kMinRowsToMultiplyInputInSteps<gemm_t> <= kMaxRowsOfABlock<gemm_t>);

  void run(int64_t begin, int64_t end, Barrier& barrier) const {
    for (int64_t slot = begin; slot < end; ++slot) {
      const Part panels(panels_, slot, shape_.slots());
      for (auto panel = panels.begin; packs_ && panel < panels.end; ++panel) {
        pack(panel);
      }
    }
    if (!barrier.wait(end - begin)) {
      return;
    }
    for (const auto& chunk : chunks_) {
      for (int64_t slot = begin; multiplies_input_first_ && slot < end;
           ++slot) {
        multiply_input(slot, chunk);
      }
      for (auto step = chunk.begin; step < chunk.end; ++step) {
        for (int64_t slot = begin; slot < end; ++slot) {
          one_step(slot, chunk, step);
        }
        if (shape_.unit_groups > 1 && !barrier.wait(end - begin)) {
          return;
        }
      }
    }
  }

  void pack(int64_t panel) const {
    constexpr auto pair = kPair<gemm_t>;
    using from_t = std::conditional_t<pair == 2, Pair<scalar_t>, scalar_t>;
    using to_t = std::conditional_t<pair == 2, Pair<gemm_t>, gemm_t>;
    for (int64_t gate = 0; gate < 3; ++gate) {
      vectorized<Transpose<from_t, to_t>>(
          {.from =
               {reinterpret_cast<const from_t*>(weights_of(panel, gate).data),
                a_.sizes.features() / pair},
           .columns = units_of(panel),
           .padded = units_,
           .to =
               {reinterpret_cast<to_t*>(packed_weights(panel).data) +
                    gate * units_,
                width_}},
          0,
          a_.sizes.features() / pair);
    }
  }

  Matrix<const scalar_t> weights_of(int64_t panel, int64_t gate) const {
    const auto row = gate * a_.sizes.state_size + panel * units_;
    return {a_.weights + row * a_.sizes.features(), a_.sizes.features()};
  }

  int64_t units_of(int64_t panel) const {
    return std::min(units_, a_.sizes.state_size - panel * units_);
  }

  Matrix<gemm_t> packed_weights(int64_t panel) const {
    return {weights_.data() + panel * a_.sizes.features() * width_, width_};
  }

  // C [rows, width_] of a panel: = or += A @ the weights of K features.
  void multiply(
      int64_t rows,
      int64_t panel,
      int64_t first_feature,
      int64_t K,
      const gemm_t* A,
      opmath_t* C,
      bool accumulate) const {
    if (packs_) {
      constexpr auto method =
          kPair<gemm_t> == 2 ? Method::kOneDNN : Method::kTile;
      gemm<gemm_t>(
          method,
          {.M = rows,
           .N = width_,
           .K = K,
           .A = {A, K},
           .B = packed_weights(panel).part(first_feature, 0),
           .C = {C, width_},
           .accumulate = accumulate,
           // all_rows are these rows alone. Of a packed panel they decide only
           // whether one row or two add up in several chains, and threads do
           // not divide so few rows.
           .chain = chain_of(rows, /*is_packed=*/true)});
    } else if constexpr (!kConverts && kPair<gemm_t> == 1) {
      for (int64_t gate = 0; gate < 3; ++gate) {
        dot<gemm_t>(
            {.M = rows,
             .N = units_of(panel),
             .K = K,
             .A = {A, K},
             .B = weights_of(panel, gate).part(0, first_feature),
             .C = {C + gate * units_, width_},
             .accumulate = accumulate});
      }
    }
  }

  // All steps of a chunk are multiplied with the input before the first of them
  // runs. Where threads divide the rows, each step is a product of its own
  // here. To multiply it when the step runs would take 21 % longer for
  // 64x16x128x256 in bfloat16, on two threads of the Xeon.
  void multiply_input(int64_t slot, const SequenceChunk& chunk) const {
    if (shape_.row_groups == 1) {
      return multiply_input(
          slot, chunk, /*row_of_products=*/0, chunk.first_row, chunk.rows);
    }
    for (auto step = chunk.begin; step < chunk.end; ++step) {
      const auto rows = rows_of(slot, step);
      const auto first_row = a_.steps[step].first_row + rows.begin;
      const auto row = row_of_products(chunk, step);
      multiply_input(slot, chunk, row, first_row, rows.size());
    }
  }

  void multiply_input(
      int64_t slot,
      const SequenceChunk& chunk,
      int64_t row_of_products,
      int64_t first_row,
      int64_t rows) const {
    const auto* A = input_of(slot, first_row, rows);
    const auto panels = panels_of(slot);
    for (auto panel = panels.begin; panel < panels.end; ++panel) {
      multiply(
          rows,
          panel,
          a_.sizes.state_size,
          a_.sizes.input_features,
          A,
          products_of(slot, chunk, panel, row_of_products),
          false);
    }
  }

  void one_step(int64_t slot, const SequenceChunk& chunk, int64_t i) const {
    const auto rows = rows_of(slot, i);
    const auto panels = panels_of(slot);
    const auto first_row = a_.steps[i].first_row + rows.begin;
    const auto* old_h = a_.old_h.template rows<gemm_t>(
        i, rows.begin, rows.end, old_h_.data() + slot * old_h_per_slot());
    const auto* input = multiplies_input_first_
        ? nullptr
        : input_of(slot, first_row, rows.size());
    const auto pointers = a_.cell_pointers(
        i,
        rows,
        panels.begin * units_,
        std::min(panels.end * units_, a_.sizes.state_size),
        bias_.data());
    const auto blocks = at::divup(rows.size(), kMaxRowsOfABlock<gemm_t>);
    for (int64_t block = 0; block < blocks; ++block) {
      const Part rows_of_block(rows.size(), block, blocks);
      for (int64_t j = 0; j < panels.size(); ++j) {
        const auto panel =
            panels.begin + panel_in_turn(i + block, j, panels.size());
        one_panel(
            panel,
            rows_of_block,
            old_h,
            input,
            pointers,
            products_of(slot, chunk, panel, row_of_products(chunk, i)));
      }
    }
  }

  void one_panel(
      int64_t panel,
      const Part& rows,
      const gemm_t* old_h,
      const gemm_t* input, // null: products has the products with the input
      const CellPointers<scalar_t>& pointers,
      opmath_t* products) const {
    const auto size = a_.sizes.state_size;
    if (input != nullptr && a_.sizes.input_features > 0) {
      const auto features = a_.sizes.input_features;
      const auto* A = input + rows.begin * features;
      multiply(rows.size(), panel, size, features, A, products, false);
    }
    const auto* A = old_h + rows.begin * size;
    multiply(
        rows.size(), panel, 0, size, A, products, a_.sizes.input_features > 0);
    const auto unit = panel * units_;
    vectorized<Gates<scalar_t>>(
        {.pointers = pointers,
         .products = products,
         .ld = units_,
         .first_row = rows.begin,
         .first_unit = unit,
         .end_unit = std::min(unit + units_, size)},
        0,
        rows.size());
  }

  // Rows of input, which are converted where the types differ.
  const gemm_t* input_of(int64_t slot, int64_t row, int64_t rows) const {
    const auto size = a_.sizes.input_features;
    const auto* from = a_.input + row * size;
    if constexpr (kConverts) {
      auto* to = input_.data() + slot * input_per_slot();
      vectorized<ConvertRows<scalar_t, gemm_t>>(
          {{from, size}, size, {to, size}}, 0, rows);
      return to;
    } else {
      return from;
    }
  }

  // The rows of a step that belong to a slot.
  Part rows_of(int64_t slot, int64_t step) const {
    return shape_.rows(slot, a_.sizes.batch, a_.steps[step].rows);
  }

  // The first row of a step among the products of a panel that a slot keeps for
  // many steps.
  int64_t row_of_products(const SequenceChunk& chunk, int64_t step) const {
    return shape_.row_groups == 1 ? a_.steps[step].first_row - chunk.first_row
                                  : (step - chunk.begin) * slot_rows_of_step();
  }

  // Products with input are kept for a chunk, others for a block of rows. Each
  // slot has memory of its own: one buffer for all would take 5 % longer for
  // 64x16x128x256 in bfloat16, on two threads of the Xeon.
  opmath_t* products_of(
      int64_t slot,
      const SequenceChunk& chunk,
      int64_t panel,
      int64_t row) const {
    auto* products = products_.data() + slot * products_per_slot();
    const auto of_slot = panel - panels_of(slot).begin;
    return multiplies_input_first_
        ? products + (of_slot * slot_rows_of_chunk(chunk) + row) * width_
        : products;
  }

  int64_t products_per_slot() const {
    return multiplies_input_first_ ? most_slot_rows_of_chunk() *
            at::divup(panels_, shape_.unit_groups) * width_
                                   : kMaxRowsOfABlock<gemm_t> * width_;
  }

  // Threads divide rows only where each step has the whole batch.
  int64_t most_slot_rows_of_chunk() const {
    return shape_.row_groups == 1
        ? most_rows(chunks_)
        : most_rows(chunks_) / a_.sizes.batch * slot_rows_of_step();
  }

  int64_t slot_rows_of_chunk(const SequenceChunk& chunk) const {
    return shape_.row_groups == 1
        ? chunk.rows
        : (chunk.end - chunk.begin) * slot_rows_of_step();
  }

  int64_t slot_rows_of_step() const {
    return at::divup(a_.sizes.batch, shape_.row_groups);
  }

  int64_t old_h_per_slot() const {
    // OldH copies rows if types differ, not all are carried, or some are reset.
    const bool copies =
        kConverts || a_.packed || a_.old_h.resets.data != nullptr;
    return copies ? slot_rows_of_step() * a_.sizes.state_size : 0;
  }

  int64_t input_per_slot() const {
    const auto rows =
        multiplies_input_first_ ? most_rows(chunks_) : slot_rows_of_step();
    return rows * a_.sizes.input_features;
  }

  // The tile takes one vector. Pairs are multiplied faster with 32 units: in 4
  // to 19 % less time than with 16, on the Xeon. They take 16 if padding to 32
  // would add an eighth or more. Weights that are read as they lie take as
  // many.
  int64_t units_per_panel() const {
    if (packs_ && kPair<gemm_t> == 1) {
      return vector_bytes() / int64_t(sizeof(opmath_t));
    }
    const auto padding = round_up(a_.sizes.state_size, 2 * kVector) -
        round_up(a_.sizes.state_size, kVector);
    return 8 * padding > a_.sizes.state_size ? kVector : 2 * kVector;
  }

  Part panels_of(int64_t slot) const {
    return shape_.panels(slot, panels_);
  }

  TeamShape shape() const {
    const auto nanoseconds = a_.sizes.batch * a_.sizes.state_size *
        (6 * a_.sizes.features() / kFlopPerNanosecond + kNanosecondsOfGates);
    return shape_for_steps<gemm_t>(a_, nanoseconds, panels_);
  }

  // The products that are kept fit in half of an L2 cache.
  int64_t max_chunk_rows() const {
    return multiplies_input_first_
        ? l2_bytes() / 2 / (panels_ * width_ * int64_t(sizeof(opmath_t)))
        : std::numeric_limits<int64_t>::max();
  }

  const SequenceForwardPointers<scalar_t>& a_;
  const bool packs_;
  const int64_t units_ = units_per_panel();
  const int64_t width_ = 3 * units_;
  const int64_t panels_ = at::divup(a_.sizes.state_size, units_);
  const TeamShape shape_;
  const bool multiplies_input_first_;
  const std::vector<SequenceChunk> chunks_;
  const InOpmath<scalar_t> bias_;
  const Scratch<gemm_t> weights_;
  const Scratch<opmath_t> products_;
  const Scratch<gemm_t> old_h_;
  const Scratch<gemm_t> input_;
};

} // namespace lltm
