#include "cpu/lltm_sequence_forward.h"

#include "cpu/choices.h"
#include "cpu/lltm_forward.h"
#include "cpu/lltm_forward_pointwise.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/primitives/dot.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/gemm_of_rows.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/profiled_path.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/team.h"
#include "cpu/primitives/vectorize.h"

#include <ATen/OpMathType.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace lltm {

namespace {

// With weights as they lie, as a loop over the cell.
template <typename scalar_t>
void forward_step_by_step(const SequenceForwardPointers<scalar_t>& a) {
  const auto size = a.state_size;
  const OldStates<scalar_t> h{a.steps, size, a.output, a.h0, a.resets};
  const OldStates<scalar_t> cell{a.steps, size, a.cells, a.c0, a.resets};
  const UnroundedCells<scalar_t> unrounded_cells(a.batch, size, a.c0);
  const Scratch<scalar_t> scratch(2 * a.batch * size);
  for (size_t i = 0; i < a.steps.size(); ++i) {
    const auto [row, rows, carried] = a.steps[i];
    unrounded_cells.reset(h, i, 0, rows, 0, size);
    forward_step<scalar_t>({
        {rows, a.input_features, size},
        a.input + row * a.input_features,
        a.weights,
        a.bias,
        h.rows(i, 0, rows, scratch.data()),
        unrounded_cells.kAny
            ? nullptr
            : cell.rows(i, 0, rows, scratch.data() + a.batch * size),
        a.output + row * size,
        a.cells + row * size,
        a.gates == nullptr ? nullptr : a.gates + row * 3 * size,
        unrounded_cells.before(i, 0),
        unrounded_cells.after(i, 0),
    });
  }
}

// gates = [old_h, input] @ weights.T, by blocks of hidden units. The weights
// are packed once, with the three gates of a block side by side, or are read as
// they lie: then the products of padding are not written. Products with input
// are computed for many steps at once. Each step adds the products with old_h
// in place, and computes the gates while the products lie in the cache.
template <typename scalar_t, typename gemm_t>
class SequenceForward {
 public:
  SequenceForward(const SequenceForwardPointers<scalar_t>& pointers, bool packs)
      : a_(pointers),
        packs_(packs),
        old_h_{a_.steps, a_.state_size, a_.output, a_.h0, a_.resets},
        old_cell_{a_.steps, a_.state_size, a_.cells, a_.c0, a_.resets},
        unrounded_cells_(a_.batch, a_.state_size, a_.c0),
        shape_(shape()),
        chunks_(sequence_chunks(a_.steps, max_chunk_rows())),
        most_rows_(most_rows(chunks_)),
        weights_(packs_ ? blocks_ * width_ * a_.features() : 0),
        products_(shape_.slots() * products_per_slot()),
        rows_(gathers_ ? shape_.slots() * 2 * states_per_slot() : 0),
        converted_(kConverts ? shape_.slots() * converted_per_slot() : 0) {}

  void run() {
    run_team(shape_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
      run(begin, end, barrier);
      release_gemm<gemm_t>();
    });
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;
  static constexpr bool kUnrounded = UnroundedCells<scalar_t>::kAny;

  struct Slot {
    Part rows;   // of the batch
    Part blocks; // of units
    opmath_t* products;
    scalar_t* old_h;
    scalar_t* old_cell;
    gemm_t* converted;
  };

  // Fewer vectors where padding to more costs more than they gain.
  int64_t units_per_block() const {
    const auto size = a_.state_size;
    auto units = kVector * vectors_of_a_block(a_.batch, size, sizeof(gemm_t));
    const auto padding = [&] {
      return round_up(size, units) - round_up(size, kVector);
    };
    while (8 * padding() > size) {
      units /= 2;
    }
    return units;
  }

  TeamShape shape() const {
    const auto nanoseconds = a_.batch * a_.state_size *
        (6 * a_.features() / kFlopPerNanosecond + kNanosecondsOfGates);
    const auto weight_bytes =
        3 * a_.state_size * a_.state_size * int64_t(sizeof(gemm_t));
    return team_shape(
        nanoseconds,
        a_.steps.size(),
        max_row_groups(a_.packed, a_.batch, weight_bytes),
        blocks_);
  }

  // The products of a chunk fit in half of an L2 cache.
  int64_t max_chunk_rows() const {
    return l2_bytes() / 2 / (blocks_ * width_ * int64_t(sizeof(opmath_t)));
  }

  // How many rows of a step one slot takes.
  int64_t rows_per_slot() const {
    return (a_.batch + shape_.row_groups - 1) / shape_.row_groups;
  }

  int64_t states_per_slot() const {
    return rows_per_slot() * a_.state_size;
  }

  int64_t products_per_slot() const {
    const auto groups = shape_.unit_groups;
    const auto rows = shape_.row_groups == 1
        ? most_rows_
        : most_rows_ / a_.batch * rows_per_slot();
    return rows * ((blocks_ + groups - 1) / groups) * width_;
  }

  int64_t converted_per_slot() const {
    const auto rows = shape_.row_groups == 1 ? most_rows_ : rows_per_slot();
    return std::max(rows * a_.input_features, states_per_slot());
  }

  Slot slot(int64_t i) const {
    auto* rows = gathers_ ? rows_.data() + i * 2 * states_per_slot() : nullptr;
    return {
        Part(a_.batch, i / shape_.unit_groups, shape_.row_groups),
        Part(blocks_, i % shape_.unit_groups, shape_.unit_groups),
        products_.data() + i * products_per_slot(),
        rows,
        gathers_ ? rows + states_per_slot() : nullptr,
        kConverts ? converted_.data() + i * converted_per_slot() : nullptr};
  }

  void run(int64_t begin, int64_t end, Barrier& barrier) const {
    for (int64_t i = begin; i < end; ++i) {
      const Part blocks(blocks_, i, shape_.slots());
      if (packs_) {
        for (auto block = blocks.begin; block < blocks.end; ++block) {
          pack(block);
        }
      }
    }
    if (!barrier.wait(end - begin)) {
      return;
    }
    for (const auto& chunk : chunks_) {
      for (int64_t i = begin; i < end; ++i) {
        multiply_input(slot(i), chunk);
      }
      for (int64_t step = chunk.begin; step < chunk.end; ++step) {
        for (int64_t i = begin; i < end; ++i) {
          one_step(slot(i), chunk, step);
        }
        if (shape_.unit_groups > 1 && !barrier.wait(end - begin)) {
          return;
        }
      }
    }
  }

  gemm_t* packed(int64_t block, int64_t feature) const {
    return weights_.data() + (block * a_.features() + feature) * width_;
  }

  int64_t units_of(int64_t block) const {
    return std::min(units_, a_.state_size - block * units_);
  }

  void pack(int64_t block) const {
    constexpr auto pair = kPair<gemm_t>;
    using from_t = std::conditional_t<pair == 2, Pair<scalar_t>, scalar_t>;
    using to_t = std::conditional_t<pair == 2, Pair<gemm_t>, gemm_t>;
    const auto features = a_.features();
    for (int64_t gate = 0; gate < 3; ++gate) {
      const auto row = gate * a_.state_size + block * units_;
      vectorized<PackTransposed<from_t, to_t>>()(
          {reinterpret_cast<const from_t*>(a_.weights + row * features),
           features / pair,
           units_of(block),
           units_,
           reinterpret_cast<to_t*>(packed(block, 0)) + gate * units_,
           width_},
          0,
          features / pair);
    }
  }

  // C [rows, width_] of a block: = or += A @ weights.T over size_k features,
  // from first_feature on.
  void multiply(
      int64_t rows,
      int64_t block,
      int64_t first_feature,
      int64_t size_k,
      const gemm_t* A,
      opmath_t* C,
      bool accumulate) const {
    if constexpr (std::is_same_v<scalar_t, opmath_t>) {
      if (!packs_) {
        for (int64_t gate = 0; gate < 3; ++gate) {
          const auto row = gate * a_.state_size + block * units_;
          dot(rows,
              units_of(block),
              size_k,
              A,
              size_k,
              a_.weights + row * a_.features() + first_feature,
              a_.features(),
              C + gate * units_,
              width_,
              accumulate);
        }
        return;
      }
    }
    for (int64_t k = 0; k < size_k; k += kMaxK<gemm_t>) {
      gemm_of_rows<gemm_t>(
          rows,
          width_,
          std::min(kMaxK<gemm_t>, size_k - k),
          A + k,
          size_k,
          packed(block, first_feature + k),
          width_,
          C,
          width_,
          accumulate || k > 0);
    }
  }

  const gemm_t* convert(
      const scalar_t* from,
      int64_t rows,
      int64_t columns,
      gemm_t* scratch) const {
    if constexpr (kConverts) {
      vectorized<ConvertRows<scalar_t, gemm_t>>()(
          {from, columns, columns, scratch, columns}, 0, rows);
      return scratch;
    } else {
      return from;
    }
  }

  // Rows of a step that belong to a slot.
  Part rows_of(const Slot& slot, int64_t step) const {
    auto rows = slot.rows;
    rows.end = std::min(rows.end, a_.steps[step].rows);
    return rows;
  }

  // The products of a step for the first block of a slot.
  opmath_t* products_of(
      const Slot& slot,
      const SequenceChunk& chunk,
      int64_t step) const {
    const auto row = shape_.row_groups == 1
        ? a_.steps[step].first_row - chunk.first_row
        : (step - chunk.begin) * slot.rows.size();
    return slot.products + row * width_;
  }

  int64_t block_stride(const Slot& slot, const SequenceChunk& chunk) const {
    return width_ *
        (shape_.row_groups == 1 ? chunk.rows
                                : (chunk.end - chunk.begin) * slot.rows.size());
  }

  void multiply_input(const Slot& slot, const SequenceChunk& chunk) const {
    if (shape_.row_groups == 1) {
      return multiply_input(
          slot, chunk, chunk.first_row, chunk.rows, slot.products);
    }
    for (int64_t step = chunk.begin; step < chunk.end; ++step) {
      multiply_input(
          slot,
          chunk,
          a_.steps[step].first_row + slot.rows.begin,
          slot.rows.size(),
          products_of(slot, chunk, step));
    }
  }

  void multiply_input(
      const Slot& slot,
      const SequenceChunk& chunk,
      int64_t first_row,
      int64_t rows,
      opmath_t* products) const {
    const auto size = a_.input_features;
    const auto* A =
        convert(a_.input + first_row * size, rows, size, slot.converted);
    for (auto block = slot.blocks.begin; block < slot.blocks.end; ++block) {
      multiply(
          rows,
          block,
          a_.state_size,
          size,
          A,
          products + (block - slot.blocks.begin) * block_stride(slot, chunk),
          false);
    }
  }

  void one_step(const Slot& slot, const SequenceChunk& chunk, int64_t step)
      const {
    const auto rows = rows_of(slot, step);
    if (rows.size() <= 0) {
      return;
    }
    const auto size = a_.state_size;
    const auto* old_h = old_h_.rows(step, rows.begin, rows.end, slot.old_h);
    const auto* A = convert(old_h, rows.size(), size, slot.converted);
    const auto* old_cell = kUnrounded
        ? nullptr
        : old_cell_.rows(step, rows.begin, rows.end, slot.old_cell);
    unrounded_cells_.reset(
        old_h_,
        step,
        rows.begin,
        rows.end,
        slot.blocks.begin * units_,
        std::min(slot.blocks.end * units_, size));
    const auto row = a_.steps[step].first_row + rows.begin;
    const ForwardPointers<scalar_t> pointers{
        {rows.size(), a_.input_features, size},
        nullptr,
        nullptr,
        a_.bias,
        old_h,
        old_cell,
        a_.output + row * size,
        a_.cells + row * size,
        a_.gates == nullptr ? nullptr : a_.gates + row * 3 * size,
        unrounded_cells_.before(step, rows.begin),
        unrounded_cells_.after(step, rows.begin)};
    const auto stride = block_stride(slot, chunk);
    auto* const products = products_of(slot, chunk, step);
    const auto together =
        std::max<int64_t>(1, kProductsInL1 / (width_ * rows.size()));
    const auto groups = (slot.blocks.size() + together - 1) / together;
    const auto direction = takes_blocks_in_order(step) ? 1 : -1;
    const auto to_next_units =
        rows.size() < kRowsWorthFetching ? 0 : direction * together * units_;
    for (int64_t i = 0; i < groups; ++i) {
      const auto group = block_in_turn(step, i, groups);
      const auto first = slot.blocks.begin + group * together;
      const auto last = std::min(first + together, slot.blocks.end);
      auto* const C = products + group * together * stride;
      for (int64_t j = 0; j < last - first; ++j) {
        const auto block = block_in_turn(step, j, last - first);
        multiply(
            rows.size(),
            first + block,
            0,
            size,
            A,
            C + block * stride,
            a_.input_features > 0);
      }
      forward_pointwise<scalar_t>(
          pointers,
          {C,
           units_,
           0,
           rows.size(),
           first * units_,
           std::min(last * units_, size),
           stride,
           to_next_units});
    }
  }

  const SequenceForwardPointers<scalar_t>& a_;
  const bool packs_;
  const OldStates<scalar_t> old_h_;
  const OldStates<scalar_t> old_cell_;
  const UnroundedCells<scalar_t> unrounded_cells_;
  const int64_t units_ = units_per_block();
  const int64_t width_ = 3 * units_;
  const int64_t blocks_ = (a_.state_size + units_ - 1) / units_;
  const TeamShape shape_;
  const std::vector<SequenceChunk> chunks_;
  const int64_t most_rows_;
  // Whether the states that a step begins with may lie apart.
  const bool gathers_ = a_.packed || a_.resets != nullptr;
  const Scratch<gemm_t> weights_;
  const Scratch<opmath_t> products_;
  const Scratch<scalar_t> rows_;
  const Scratch<gemm_t> converted_;
};

} // namespace

template <typename scalar_t>
void sequence_forward_steps(const SequenceForwardPointers<scalar_t>& pointers) {
  if (pointers.steps.size() < kStepsWorthPacking) {
    const ProfiledPath path("lltm::sequence_forward_step_by_step");
    return forward_step_by_step(pointers);
  }
  if constexpr (kPair<scalar_t> == 2) {
    const bool whole_pairs =
        pointers.state_size % 2 == 0 && pointers.input_features % 2 == 0;
    if (whole_pairs && has_bfloat16_gemm()) {
      const ProfiledPath path("lltm::sequence_forward_gemm_bfloat16");
      return SequenceForward<scalar_t, scalar_t>(pointers, true).run();
    }
  }
  using opmath_t = at::opmath_type<scalar_t>;
  if constexpr (std::is_same_v<scalar_t, opmath_t>) {
    const auto size = pointers.state_size;
    const auto weight_bytes = 3 * size * size * int64_t(sizeof(scalar_t));
    if (!is_packing_faster(
            pointers.batch, pointers.steps.size(), weight_bytes)) {
      const ProfiledPath path("lltm::sequence_forward_dot");
      return SequenceForward<scalar_t, scalar_t>(pointers, false).run();
    }
  }
  const ProfiledPath path("lltm::sequence_forward_gemm");
  SequenceForward<scalar_t, opmath_t>(pointers, true).run();
}

template void sequence_forward_steps(const SequenceForwardPointers<double>&);
template void sequence_forward_steps(const SequenceForwardPointers<float>&);
template void sequence_forward_steps(const SequenceForwardPointers<c10::Half>&);
template void sequence_forward_steps(
    const SequenceForwardPointers<c10::BFloat16>&);

} // namespace lltm
