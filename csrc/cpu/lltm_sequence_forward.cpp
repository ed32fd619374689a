#include "cpu/lltm_cell.h"
#include "cpu/lltm_sequence_old_h.h"
#include "cpu/lltm_sequence_plan.h"
#include "cpu/primitives/barrier.h"
#include "cpu/primitives/dot.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
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
// With one row or two of weights that L2 does not hold, packing saves time only
// from more steps on: 10x1x1024x1024 takes half as long without.
constexpr int64_t kStepsOfFewRowsWorthPacking = 40;
constexpr int64_t kBytesBeyondL2 = 3 << 20;
// With fewer rows of the batch, the products with the input are made for many
// steps at once, so each step reads only the weights for h.
constexpr int64_t kRowsWorthInputInSteps = 32;
constexpr int64_t kBytesOfAChunk = 512 << 10; // they stay in L2
// Rows of a step that a panel is multiplied with at a time. Their operands and
// products fit in the caches, in which pairs take half the room.
template <typename gemm_t>
constexpr int64_t kRowsAtOnce = 64 * kPair<gemm_t>;

// Lets glibc keep so much free memory, up to 62 MiB, for the next call. glibc
// gives the free end of its heap back to the system if it is larger than a
// threshold, and then the next call faults its pages in anew: 40x24x100x300
// takes 1.4 times as long. The threshold becomes twice the size of a block that
// was mapped and is freed, so one is, which nobody has touched.
void keep_memory(int64_t bytes) {
  static std::atomic<int64_t> kept = 0;
  constexpr int64_t most = 31 << 20;
  if (bytes > kept && kept < most) {
    kept = bytes;
    void* volatile block = std::malloc(std::min(bytes, most));
    std::free(block);
  }
}

// To contiguous memory; batch is that of h0.
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
  opmath_t* cell_states;
  scalar_t* output;
  scalar_t* cells;
  scalar_t* gates; // null: not wanted

  // What the gates of a step's rows need, from a row on.
  CellPointers<scalar_t>
  of_step(int64_t i, int64_t first_row, const opmath_t* bias) const {
    const auto size = sizes.state_size;
    auto* const cell = cell_states + first_row * size;
    const auto at = (steps[i].first_row + first_row) * size;
    return {
        .state_size = size,
        .math = math,
        .bias = bias,
        .old_cell = cell,
        .next_cell = cell,
        .new_h = output + at,
        .new_cell = cells + at,
        .gates = gates == nullptr ? nullptr : gates + kGates * at};
  }

  // In rows that a step resets, some units' cell states become zero.
  void reset(int64_t i, const Share& rows, const Share& units) const {
    resets.template zero<opmath_t>(
        steps[i], rows, units, {cell_states, sizes.state_size});
  }
};

// With weights as they lie.
template <typename scalar_t>
void loop_over_the_cell(const SequenceForwardPointers<scalar_t>& p) {
  using opmath_t = at::opmath_type<scalar_t>;
  const Converted<scalar_t, opmath_t> bias(p.bias, p.sizes.gate_units());
  Scratch<scalar_t> scratch(p.sizes.batch * p.sizes.state_size);
  const Share units(p.sizes.state_size, 0, 1);
  for (size_t i = 0; i < p.steps.size(); ++i) {
    const auto first_row = p.steps[i].first_row;
    const Share rows(p.steps[i].rows, 0, 1);
    p.reset(i, rows, units);
    cell_forward<scalar_t>(
        {.sizes = {rows.size(), p.sizes.input_features, p.sizes.state_size},
         .input = p.input + first_row * p.sizes.input_features,
         .weights = p.weights,
         .old_h = old_h<scalar_t>(p, i, rows, scratch.data()),
         .cell = p.of_step(i, 0, bias.data())});
  }
}

struct SequenceForwardPlan {
  SequencePlan slots;
  int64_t panel_width; // kGates times the units
  bool packs;          // or reads weights as they lie
  bool multiplies_input_first;
  int64_t rows_of_a_chunk;
  int64_t rows_per_slot;
};

// One vector of each gate, so the tile takes three. Pairs are multiplied faster
// with 32 units than with 16. They take 16 if padding to 32 would add an eighth
// or more.
template <typename gemm_t>
int64_t units_per_panel(int64_t state_size) {
  if (kPair<gemm_t> == 1) {
    return lanes_of_a_register<gemm_t>();
  }
  const auto padding = round_up(state_size, 32) - round_up(state_size, 16);
  return 8 * padding > state_size ? 16 : 32;
}

template <typename scalar_t, typename gemm_t>
SequenceForwardPlan plan_of(
    const CellSizes& sizes,
    int64_t steps,
    bool has_batch_sizes,
    int64_t threads) {
  const auto slots = plan_of(
      sizes,
      steps,
      has_batch_sizes,
      units_per_panel<gemm_t>(sizes.state_size),
      2 * kGates * sizes.features(),
      threads);
  const auto panel_width = kGates * slots.units_per_panel;
  // If threads divide the rows, a step multiplies its input when it runs.
  const bool multiplies_input_first = sizes.input_features > 0 &&
      slots.row_groups == 1 && sizes.batch < kRowsWorthInputInSteps;
  constexpr int64_t bytes_of_a_sum = sizeof(at::opmath_type<gemm_t>);
  const auto bytes_of_a_row = slots.panels * panel_width * bytes_of_a_sum;
  return {
      .slots = slots,
      .panel_width = panel_width,
      .packs = !std::is_same_v<scalar_t, at::opmath_type<scalar_t>> ||
          sizes.batch > 2 || steps >= kStepsOfFewRowsWorthPacking ||
          sizes.state_size * bytes_of_a_row < kBytesBeyondL2,
      .multiplies_input_first = multiplies_input_first,
      .rows_of_a_chunk = multiplies_input_first
          ? kBytesOfAChunk / bytes_of_a_row
          : std::numeric_limits<int64_t>::max(),
      .rows_per_slot = at::divup(sizes.batch, slots.row_groups)};
}

// products = [old_h, input] @ weights.T, by panels of the weights of some
// hidden units, [features, kGates, units]. The products of a panel become gates
// and new states while they are in the cache.
template <typename scalar_t, typename gemm_t>
class SequenceForward {
 public:
  using opmath_t = at::opmath_type<scalar_t>;

  explicit SequenceForward(const SequenceForwardPointers<scalar_t>& pointers)
      : p_(pointers),
        plan_(
            plan_of<scalar_t, gemm_t>(
                p_.sizes,
                p_.steps.size(),
                p_.has_batch_sizes,
                available_threads())),
        chunks_(sequence_chunks(p_.steps, plan_.rows_of_a_chunk)),
        bias_(p_.bias, p_.sizes.gate_units()),
        weights_(
            plan_.packs ? p_.sizes.features() : 0,
            plan_.slots.panels * plan_.panel_width,
            plan_.panel_width),
        products_(
            plan_.panel_width *
            (plan_.multiplies_input_first
                 ? plan_.slots.panels * most_rows(chunks_)
                 : plan_.slots.slots() * kRowsAtOnce<gemm_t>)),
        old_h_(plan_.slots.slots() * plan_.rows_per_slot * p_.sizes.state_size),
        input_rows_per_slot_(
            std::is_same_v<scalar_t, gemm_t>   ? 0
                : plan_.multiplies_input_first ? most_rows(chunks_)
                                               : plan_.rows_per_slot),
        input_(
            plan_.slots.slots() * input_rows_per_slot_ *
            p_.sizes.input_features) {}

  void run() {
    RECORD_USER_SCOPE(name_of_plan<gemm_t>(plan_.slots));
    run_together(
        plan_.slots.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
          const ProductGuard<gemm_t> guard;
          run(begin, end, barrier);
        });
  }

 private:
  void run(int64_t begin, int64_t end, Barrier& barrier) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const Share panels(plan_.slots.panels, slot, plan_.slots.slots());
      for (auto panel = panels.begin; plan_.packs && panel < panels.end;
           ++panel) {
        pack(panel);
      }
    }
    if (!barrier.wait(end - begin)) {
      return;
    }
    for (const auto& chunk : chunks_) {
      for (int64_t slot = begin; plan_.multiplies_input_first && slot < end;
           ++slot) {
        multiply_input(slot, chunk);
      }
      for (auto i = chunk.begin; i < chunk.end; ++i) {
        for (int64_t slot = begin; slot < end; ++slot) {
          one_step(slot, chunk, i);
        }
        if (plan_.slots.needs_barrier() && !barrier.wait(end - begin)) {
          return;
        }
      }
    }
  }

  // The weights of a gate for a panel's units, as they lie.
  Matrix<const scalar_t> weights_of(int64_t panel, int64_t gate) const {
    const auto row =
        gate * p_.sizes.state_size + panel * plan_.slots.units_per_panel;
    return {p_.weights + row * p_.sizes.features(), p_.sizes.features()};
  }

  void pack(int64_t panel) {
    for (int64_t gate = 0; gate < kGates; ++gate) {
      weights_.template pack_transposed<scalar_t>(
          panel,
          gate * plan_.slots.units_per_panel,
          0,
          weights_of(panel, gate),
          plan_.slots.units_in(panel),
          p_.sizes.features());
    }
  }

  // C [rows, panel_width] = or += A @ a panel's weights of K features.
  void multiply_panel(
      int64_t rows,
      int64_t panel,
      int64_t first_feature,
      int64_t K,
      const gemm_t* A,
      opmath_t* C,
      bool accumulate) const {
    if constexpr (std::is_same_v<scalar_t, opmath_t>) {
      for (int64_t gate = 0; !plan_.packs && gate < kGates; ++gate) {
        dot<gemm_t>(
            {.M = rows,
             .N = plan_.slots.units_in(panel),
             .K = K,
             .A = {A, K},
             .B = weights_of(panel, gate).part(0, first_feature),
             .C = {C + gate * plan_.slots.units_per_panel, plan_.panel_width},
             .accumulate = accumulate,
             .several_chains = true});
      }
    }
    if (!plan_.packs) {
      return;
    }
    multiply<gemm_t>(
        {.M = rows,
         .N = plan_.panel_width,
         .K = K,
         .A = {A, K},
         .B = weights_.panel(panel, first_feature),
         .C = {C, plan_.panel_width},
         .accumulate = accumulate,
         .several_chains = rows <= 2});
  }

  // The input from a row on. Of another type it is converted to the place of a
  // slot, not as a whole, so that memory does not grow with time.
  const gemm_t* input_rows(int64_t slot, int64_t first_row, int64_t rows) {
    const auto features = p_.sizes.input_features;
    const auto* input = p_.input + first_row * features;
    if constexpr (std::is_same_v<scalar_t, gemm_t>) {
      return input;
    } else {
      auto* converted = input_.data() + slot * input_rows_per_slot_ * features;
      run_with_best_isa<ConvertRows<scalar_t, gemm_t>>(
          {{input, features}, features, {converted, features}}, 0, rows);
      return converted;
    }
  }

  // All steps of a chunk, before the first of them runs.
  void multiply_input(int64_t slot, const SequenceChunk& chunk) {
    const auto* A = input_rows(slot, chunk.first_row, chunk.rows);
    plan_.slots.for_each_panel(slot, 0, [&](int64_t panel) {
      multiply_panel(
          chunk.rows,
          panel,
          p_.sizes.state_size,
          p_.sizes.input_features,
          A,
          kept_products(chunk, panel, chunk.first_row),
          false);
    });
  }

  // The products with the input that are kept for a chunk, from a row on.
  opmath_t*
  kept_products(const SequenceChunk& chunk, int64_t panel, int64_t row) {
    return products_.data() +
        (panel * chunk.rows + row - chunk.first_row) * plan_.panel_width;
  }

  void one_step(int64_t slot, const SequenceChunk& chunk, int64_t i) {
    const auto rows = plan_.slots.rows_of(slot, p_.steps[i].rows);
    const auto first_row = p_.steps[i].first_row + rows.begin;
    const auto* old_h = lltm::old_h<gemm_t>(
        p_,
        i,
        rows,
        old_h_.data() + slot * plan_.rows_per_slot * p_.sizes.state_size);
    const auto* input = plan_.multiplies_input_first
        ? nullptr
        : input_rows(slot, first_row, rows.size());
    p_.reset(i, rows, plan_.slots.units_of(slot));
    const auto pointers = p_.of_step(i, rows.begin, bias_.data());
    const auto blocks = at::divup(rows.size(), kRowsAtOnce<gemm_t>);
    for (int64_t block = 0; block < blocks; ++block) {
      const Share rows_of_block(rows.size(), block, blocks);
      plan_.slots.for_each_panel(slot, i * blocks + block, [&](int64_t panel) {
        auto* products = plan_.multiplies_input_first
            ? kept_products(chunk, panel, first_row + rows_of_block.begin)
            : products_.data() + slot * kRowsAtOnce<gemm_t> * plan_.panel_width;
        one_panel(panel, rows_of_block, old_h, input, pointers, products);
      });
    }
  }

  void one_panel(
      int64_t panel,
      const Share& rows,
      const gemm_t* old_h,
      const gemm_t* input, // null: products has the products with the input
      const CellPointers<scalar_t>& pointers,
      opmath_t* products) const {
    const auto size = p_.sizes.state_size;
    const auto features = p_.sizes.input_features;
    if (input != nullptr && features > 0) {
      const auto* A = input + rows.begin * features;
      multiply_panel(rows.size(), panel, size, features, A, products, false);
    }
    const auto* A = old_h + rows.begin * size;
    multiply_panel(rows.size(), panel, 0, size, A, products, features > 0);
    const auto unit = panel * plan_.slots.units_per_panel;
    run_with_best_isa(
        Gates<scalar_t>{
            .pointers = pointers,
            .products = products,
            .ld = plan_.slots.units_per_panel,
            .first_row = rows.begin,
            .first_unit = unit,
            .end_unit = unit + plan_.slots.units_in(panel)},
        0,
        rows.size());
  }

  const SequenceForwardPointers<scalar_t>& p_;
  const SequenceForwardPlan plan_;
  const std::vector<SequenceChunk> chunks_;
  const Converted<scalar_t, opmath_t> bias_;
  Panels<gemm_t> weights_;
  Scratch<opmath_t> products_;
  Scratch<gemm_t> old_h_; // of the rows that old_h() copies
  const int64_t input_rows_per_slot_;
  Scratch<gemm_t> input_; // of the rows that input_rows() converts
};

template <typename scalar_t>
void run_sequence(const SequenceForwardPointers<scalar_t>& p) {
  if (p.steps.size() < kStepsWorthPacking) {
    return loop_over_the_cell(p);
  }
  with_gemm_type<scalar_t>(p.sizes.has_whole_pairs(), [&](auto gemm) {
    SequenceForward<scalar_t, decltype(gemm)>(p).run();
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
  keep_memory(2 * (write_gates ? 5 : 2) * output.nbytes() + a.weights.nbytes());
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
        Scratch<opmath_t> cell_states(c_n.numel());
        auto* const c = c_n.mutable_data_ptr<scalar_t>();
        convert(c, cell_states.data(), c_n.numel());
        run_sequence<scalar_t>({
            .sizes = {a.h0.size(0), a.input.size(-1), state_size},
            .math = CellMath<opmath_t>(a),
            .steps = steps,
            .has_batch_sizes = a.batch_sizes.has_value(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .bias = bias->const_data_ptr<scalar_t>(),
            .h0 = h0->const_data_ptr<scalar_t>(),
            .resets = bytes_of(resets),
            .cell_states = cell_states.data(),
            .output = output.mutable_data_ptr<scalar_t>(),
            .cells = cells.mutable_data_ptr<scalar_t>(),
            .gates = write_gates ? gates.mutable_data_ptr<scalar_t>() : nullptr,
        });
        convert(cell_states.data(), c, c_n.numel());
      });
  auto h_n = last_states(steps, output.flatten(0, -2), a.h0);
  return {output, cells, std::move(h_n), std::move(c_n), gates};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl(
      "sequence_forward",
      as_kernel<without_gates<sequence_forward_kernel_impl<false>>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<sequence_forward_kernel_impl<true>>());
}

} // namespace lltm
