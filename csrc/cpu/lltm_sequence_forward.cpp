#include "cpu/lltm_forward.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/lltm_sequence_team.h"
#include "cpu/primitives/barrier.h"
#include "cpu/primitives/dot.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/scratch.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

// lltm::sequence_forward on the CPU, from its tensors (at the end of the file)
// to the products of a panel of hidden units.
namespace lltm {

namespace {

// With fewer steps, packing the weights saves time only at few sizes, and the
// steps are a loop over the cell.
constexpr size_t kStepsWorthPacking = 8;
// With one or two rows of the batch, and weights of which L2 keeps a third at
// most, packing saves time only from many more steps on: weights that lie as
// they are come from L3 almost as fast. Without packing, 8x2x2048x2048 takes a
// third of the time on Zen 5, and 64x1x1024x1024 3 % less.
constexpr size_t kMostStepsUnpacked = 64;

// On raw pointers to contiguous memory; batch is that of h0.
template <typename scalar_t>
struct SequenceForwardPointers {
  using opmath_t = at::opmath_type<scalar_t>;

  CellSizes sizes;
  CellMath<opmath_t> math;
  const std::vector<SequenceStep>& steps;
  bool has_batch_sizes;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* bias;
  const scalar_t* h0;
  Resets resets;
  // [batch, state_size]: at first c0, and each step leaves its cell states.
  // They are not rounded: the cell forgets nothing, so rounding at each step
  // would lose what is added to a state that has grown.
  opmath_t* states;
  scalar_t* output;
  scalar_t* cells;
  scalar_t* gates; // null: not wanted

  // Returns what the gates of a step's rows need, of which some units are
  // computed. In rows that the step resets, these units' states become zero.
  CellPointers<scalar_t> begin_step(
      int64_t i,
      const Part& rows,
      const Part& units,
      const opmath_t* bias) const {
    const auto size = sizes.state_size;
    resets.template zero<opmath_t>(steps[i], rows, units, {states, size});
    auto* state = states + rows.begin * size;
    const auto at = (steps[i].first_row + rows.begin) * size;
    return {
        .state_size = size,
        .math = math,
        .bias = bias,
        .old_cell = state,
        .next_cell = state,
        .new_h = output + at,
        .new_cell = cells + at,
        .gates = gates == nullptr ? nullptr : gates + kGates * at};
  }
};

// products = [old_h, input] @ weights.T, by panels of the weights of some
// hidden units, [features, kGates, units]. The products of a panel become gates
// and new states while they are in the cache.
template <typename scalar_t, typename gemm_t>
class SequenceForward {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  SequenceForward(const SequenceForwardPointers<scalar_t>& pointers, bool packs)
      : a_(pointers),
        packs_(packs),
        team_(a_, units_, 2 * kGates * a_.sizes.features()),
        chunks_(sequence_chunks(a_.steps, max_chunk_rows())),
        bias_(a_.bias, a_.sizes.gate_units()),
        weights_(packs_ ? a_.sizes.features() : 0, panels_ * width_, width_),
        products_(
            multiplies_input_first_
                ? most_rows(chunks_) * panels_ * width_
                : team_.slots() * kMaxRowsOfABlock * width_),
        old_h_(
            copies_old_h()
                ? team_.slots() * rows_per_slot() * a_.sizes.state_size
                : 0),
        input_(kConverts ? team_.slots() * input_per_slot() : 0) {}

  void run() const {
    run_together(
        team_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
          const typename Product<gemm_t>::Guard guard;
          run(begin, end, barrier);
        });
  }

 private:
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;
  // Rows of a step that a panel is multiplied with at a time. Their operands
  // and products fit in the caches, in which pairs take half the room.
  static constexpr int64_t kMaxRowsOfABlock = 64 * kPair<gemm_t>;
  // With fewer rows of the batch, the products with the input are made for many
  // steps at once, so each step reads only the weights for h. AMX also takes
  // time to change the shape of a product: 77x12x96x192 in bfloat16 takes 9 %
  // less time on the Xeon.
  static constexpr int64_t kMinRowsToMultiplyInputInSteps =
      kPair<gemm_t> == 2 ? 32 : 8;

  void run(int64_t begin, int64_t end, Barrier& barrier) const {
    for (int64_t slot = begin; slot < end; ++slot) {
      const Part panels(panels_, slot, team_.slots());
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
        if (team_.needs_barrier() && !barrier.wait(end - begin)) {
          return;
        }
      }
    }
  }

  void pack(int64_t panel) const {
    for (int64_t gate = 0; gate < kGates; ++gate) {
      weights_.template pack_transposed<scalar_t>(
          panel,
          gate * units_,
          0,
          weights_of(panel, gate),
          units_of(panel),
          units_,
          0,
          a_.sizes.features());
    }
  }

  Matrix<const scalar_t> weights_of(int64_t panel, int64_t gate) const {
    const auto row = gate * a_.sizes.state_size + panel * units_;
    return {a_.weights + row * a_.sizes.features(), a_.sizes.features()};
  }

  int64_t units_of(int64_t panel) const {
    return std::min(units_, a_.sizes.state_size - panel * units_);
  }

  // C [rows, width_] of a panel: = or += A @ the weights of K features.
  void multiply_panel(
      int64_t rows,
      int64_t panel,
      int64_t first_feature,
      int64_t K,
      const gemm_t* A,
      opmath_t* C,
      bool accumulate) const {
    if constexpr (std::is_same_v<scalar_t, opmath_t>) {
      for (int64_t gate = 0; !packs_ && gate < kGates; ++gate) {
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
    if (packs_) {
      multiply<gemm_t>(
          {.M = rows,
           .N = width_,
           .K = K,
           .A = {A, K},
           .B = weights_.panel(panel, first_feature),
           .C = {C, width_},
           .accumulate = accumulate});
    }
  }

  // All steps of a chunk, before the first of them runs. Where threads divide
  // rows, each step multiplies its own.
  void multiply_input(int64_t slot, const SequenceChunk& chunk) const {
    const auto* A = input_of(slot, chunk.first_row, chunk.rows);
    team_.for_each_panel(slot, 0, [&](int64_t panel) {
      multiply_panel(
          chunk.rows,
          panel,
          a_.sizes.state_size,
          a_.sizes.input_features,
          A,
          kept_products(chunk, panel, chunk.first_row),
          false);
    });
  }

  // The products with the input that are kept for a chunk, from a row on.
  opmath_t*
  kept_products(const SequenceChunk& chunk, int64_t panel, int64_t row) const {
    return products_.data() +
        (panel * chunk.rows + row - chunk.first_row) * width_;
  }

  void one_step(int64_t slot, const SequenceChunk& chunk, int64_t i) const {
    const auto rows = team_.rows(slot, a_.steps[i].rows);
    const auto first_row = a_.steps[i].first_row + rows.begin;
    const auto* old_h = lltm::old_h<gemm_t>(
        a_,
        i,
        rows,
        old_h_.data() + slot * rows_per_slot() * a_.sizes.state_size);
    const auto* input = multiplies_input_first_
        ? nullptr
        : input_of(slot, first_row, rows.size());
    const auto pointers =
        a_.begin_step(i, rows, team_.units(slot), bias_.data());
    const auto blocks = at::divup(rows.size(), kMaxRowsOfABlock);
    for (int64_t block = 0; block < blocks; ++block) {
      const Part rows_of_block(rows.size(), block, blocks);
      team_.for_each_panel(slot, i + block, [&](int64_t panel) {
        auto* products = multiplies_input_first_
            ? kept_products(chunk, panel, first_row + rows_of_block.begin)
            : products_.data() + slot * kMaxRowsOfABlock * width_;
        one_panel(panel, rows_of_block, old_h, input, pointers, products);
      });
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
    const auto features = a_.sizes.input_features;
    if (input != nullptr && features > 0) {
      const auto* A = input + rows.begin * features;
      multiply_panel(rows.size(), panel, size, features, A, products, false);
    }
    const auto* A = old_h + rows.begin * size;
    multiply_panel(rows.size(), panel, 0, size, A, products, features > 0);
    const auto unit = panel * units_;
    vectorized(
        Gates<scalar_t>{
            .pointers = pointers,
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
      vectorized(
          ConvertRows<scalar_t, gemm_t>{{from, size}, size, {to, size}},
          0,
          rows);
      return to;
    } else {
      return from;
    }
  }

  // old_h() copies rows if types differ, not all are carried, or some are
  // reset.
  bool copies_old_h() const {
    return kConverts || a_.has_batch_sizes || a_.resets.data != nullptr;
  }

  int64_t rows_per_slot() const {
    return at::divup(a_.sizes.batch, team_.row_groups());
  }

  int64_t input_per_slot() const {
    const auto rows =
        multiplies_input_first_ ? most_rows(chunks_) : rows_per_slot();
    return rows * a_.sizes.input_features;
  }

  // One vector of each gate, so the tile takes three. Pairs are multiplied
  // faster with 32 units: in 4 to 19 % less time than with 16, on the Xeon.
  // They take 16 if padding to 32 would add an eighth or more. Weights that are
  // read as they lie take as many.
  int64_t units_per_panel() const {
    if (packs_ && kPair<gemm_t> == 1) {
      return lanes_of_a_register<gemm_t>();
    }
    const auto size = a_.sizes.state_size;
    return 8 * (round_up(size, 32) - round_up(size, 16)) > size ? 16 : 32;
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
  const int64_t width_ = kGates * units_;
  const int64_t panels_ = at::divup(a_.sizes.state_size, units_);
  const Team<gemm_t> team_;
  const bool multiplies_input_first_ = a_.sizes.input_features > 0 &&
      team_.row_groups() == 1 &&
      a_.sizes.batch < kMinRowsToMultiplyInputInSteps;
  const std::vector<SequenceChunk> chunks_;
  const InOpmath<scalar_t> bias_;
  const Panels<gemm_t> weights_;
  const Scratch<opmath_t> products_;
  const Scratch<gemm_t> old_h_;
  const Scratch<gemm_t> input_;
};

// With weights as they lie, as a loop over the cell.
template <typename scalar_t>
void forward_step_by_step(const SequenceForwardPointers<scalar_t>& a) {
  const InOpmath<scalar_t> bias(a.bias, a.sizes.gate_units());
  const Scratch<scalar_t> scratch(a.sizes.batch * a.sizes.state_size);
  const Part units(a.sizes.state_size, 0, 1);
  for (size_t i = 0; i < a.steps.size(); ++i) {
    const auto first_row = a.steps[i].first_row;
    const Part rows(a.steps[i].rows, 0, 1);
    forward_step<scalar_t>(
        {.sizes = {rows.size(), a.sizes.input_features, a.sizes.state_size},
         .input = a.input + first_row * a.sizes.input_features,
         .weights = a.weights,
         .old_h = old_h<scalar_t>(a, i, rows, scratch.data()),
         .pointers = a.begin_step(i, rows, units, bias.data())});
  }
}

template <typename scalar_t>
void sequence_forward_steps(const SequenceForwardPointers<scalar_t>& a) {
  if (a.steps.size() < kStepsWorthPacking) {
    return forward_step_by_step(a);
  }
  using opmath_t = at::opmath_type<scalar_t>;
  const auto weight_bytes =
      a.sizes.gate_units() * a.sizes.state_size * int64_t(sizeof(opmath_t));
  const bool packs = !std::is_same_v<scalar_t, opmath_t> || a.sizes.batch > 2 ||
      a.steps.size() > kMostStepsUnpacked || weight_bytes <= 3 * l2_bytes();
  with_gemm_type<scalar_t>(a.sizes.has_whole_pairs(), [&](auto gemm) {
    SequenceForward<scalar_t, decltype(gemm)>(a, packs).run();
  });
}

template <bool write_gates>
SequenceForwardWithGatesResult sequence_forward_kernel_impl(
    const SequenceForwardArguments& a) {
  check_arguments(a);
  const auto steps = sequence_steps(a);
  const auto state_size = a.h0.size(1);
  auto output = empty_rows(a.input, state_size);
  auto cells = empty_rows(a.input, state_size);
  auto c_n = a.c0.clone(at::MemoryFormat::Contiguous);
  at::Tensor gates;
  if constexpr (write_gates) {
    gates = empty_rows(a.input, kGates * state_size);
  }
  if (output.numel() == 0) {
    auto h_n = a.h0.clone(at::MemoryFormat::Contiguous);
    return {output, cells, std::move(h_n), std::move(c_n), gates};
  }
  // A loop or a second layer frees twice as much before it allocates again.
  keep_memory(2 * (write_gates ? 5 : 2) * output.nbytes());
  const auto input = a.input.expect_contiguous();
  const auto weights = a.weights.expect_contiguous();
  const auto bias = a.bias.expect_contiguous();
  const auto h0 = a.h0.expect_contiguous();
  const auto resets = a.resets ? a.resets->contiguous() : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_sequence_forward_cpu",
      [&] {
        using opmath_t = at::opmath_type<scalar_t>;
        const Scratch<opmath_t> states(c_n.numel());
        auto* const c = c_n.mutable_data_ptr<scalar_t>();
        convert(c, states.data(), c_n.numel());
        sequence_forward_steps<scalar_t>({
            .sizes = {a.h0.size(0), a.input.size(-1), state_size},
            .math = CellMath<opmath_t>(a),
            .steps = steps,
            .has_batch_sizes = a.batch_sizes.has_value(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .bias = bias->const_data_ptr<scalar_t>(),
            .h0 = h0->const_data_ptr<scalar_t>(),
            .resets = bytes_of(resets),
            .states = states.data(),
            .output = output.mutable_data_ptr<scalar_t>(),
            .cells = cells.mutable_data_ptr<scalar_t>(),
            .gates = write_gates ? gates.mutable_data_ptr<scalar_t>() : nullptr,
        });
        convert(states.data(), c, c_n.numel());
      });
  auto h_n = last_states(steps, output.flatten(0, -2), a.h0);
  return {output, cells, std::move(h_n), std::move(c_n), gates};
}

SequenceForwardResult sequence_forward_kernel(
    const SequenceForwardArguments& arguments) {
  return without_gates(sequence_forward_kernel_impl<false>(arguments));
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("sequence_forward", as_kernel<sequence_forward_kernel>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<sequence_forward_kernel_impl<true>>());
}

} // namespace lltm
