#include "cpu/lltm_cell.h"
#include "cpu/lltm_sequence_plan.h"
#include "cpu/lltm_sequence_states.h"
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

// lltm::sequence_forward on the CPU, from its tensors to the products of a
// panel of hidden units. Few steps are a loop over the cell; else weights are
// packed once, for all steps, if that is worth it. Output, cells and gates have
// the rows of the input.
namespace lltm {

namespace {

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

  // These point to the rows of step i.
  CellPointers<scalar_t> cell_of_step(int64_t i, const opmath_t* bias) const {
    const auto size = sizes.state_size;
    const auto at = steps[i].first_row * size;
    return {
        .state_size = size,
        .math = math,
        .bias = bias,
        .old_cell = cell_states,
        .next_cell = cell_states,
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

template <typename scalar_t>
void run_sequence(const SequenceForwardPointers<scalar_t>& p);
void let_glibc_keep(int64_t bytes);

template <bool with_gates>
SequenceForwardWithGatesResult sequence_forward_kernel_impl(
    const SequenceForwardArguments& a) {
  check_arguments(a);
  const auto steps = sequence_steps(a);
  const auto state_size = a.h0.size(1);
  auto output = empty_rows(a.input, state_size);
  auto cells = empty_rows(a.input, state_size);
  auto c_n = a.c0.clone(at::MemoryFormat::Contiguous);
  auto gates =
      with_gates ? empty_rows(a.input, kGates * state_size) : at::Tensor();
  if (output.numel() == 0) {
    auto h_n = a.h0.clone(at::MemoryFormat::Contiguous);
    return {output, cells, std::move(h_n), std::move(c_n), gates};
  }
  // A loop or a second layer frees twice as much before it allocates again.
  let_glibc_keep(
      2 * (with_gates ? 5 : 2) * output.nbytes() + a.weights.nbytes());
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
            .resets = Resets(resets),
            .cell_states = cell_states.data(),
            .output = output.mutable_data_ptr<scalar_t>(),
            .cells = cells.mutable_data_ptr<scalar_t>(),
            .gates = with_gates ? gates.mutable_data_ptr<scalar_t>() : nullptr,
        });
        convert(cell_states.data(), c, c_n.numel());
      });
  auto h_n = last_states(steps, output.flatten(0, -2), a.h0);
  return {output, cells, std::move(h_n), std::move(c_n), gates};
}

// Lets glibc keep so much free memory, up to 62 MiB, for the next call. glibc
// gives the free end of its heap back to the system if it is larger than a
// threshold, and then the next call faults its pages in anew: 40x24x100x300
// takes 1.4 times as long. The threshold becomes twice the size of a block that
// was mapped and is freed, so one is, which nobody has touched.
void let_glibc_keep(int64_t bytes) {
  static std::atomic<int64_t> kept = 0;
  constexpr int64_t most = 31 << 20;
  if (bytes > kept && kept < most) {
    kept = bytes;
    void* volatile block = std::malloc(std::min(bytes, most));
    std::free(block);
  }
}

// With fewer steps, packing the weights saves time only at few sizes, and the
// steps are a loop over the cell.
constexpr size_t kStepsWorthPacking = 8;

template <typename scalar_t, typename gemm_t>
class SequenceForward;

template <typename scalar_t>
void loop_over_the_cell(const SequenceForwardPointers<scalar_t>& p);

template <typename scalar_t>
void run_sequence(const SequenceForwardPointers<scalar_t>& p) {
  if (p.steps.size() < kStepsWorthPacking) {
    return loop_over_the_cell(p);
  }
  with_gemm_type<scalar_t>(p.sizes.has_whole_pairs(), [&](auto gemm) {
    SequenceForward<scalar_t, decltype(gemm)>(p).run();
  });
}

// With weights as they lie.
template <typename scalar_t>
void loop_over_the_cell(const SequenceForwardPointers<scalar_t>& p) {
  using opmath_t = at::opmath_type<scalar_t>;
  const Converted<scalar_t, opmath_t> bias(p.bias, p.sizes.gate_units());
  Scratch<scalar_t> old_h(p.sizes.batch * p.sizes.state_size);
  const Share units(p.sizes.state_size, 0, 1);
  for (size_t i = 0; i < p.steps.size(); ++i) {
    const auto first_row = p.steps[i].first_row;
    const Share rows(p.steps[i].rows, 0, 1);
    p.reset(i, rows, units);
    copy_old_h(p, i, rows, old_h.data());
    cell_forward<scalar_t>(
        {.sizes = {rows.size(), p.sizes.input_features, p.sizes.state_size},
         .input = p.input + first_row * p.sizes.input_features,
         .weights = p.weights,
         .old_h = old_h.data(),
         .cell = p.cell_of_step(i, bias.data())});
  }
}

// If a batch has one row or two, and L2 does not hold the weights, packing them
// saves time only from more steps on: 10x1x1024x1024 takes half as long
// without.
constexpr int64_t kStepsOfFewRowsWorthPacking = 40;
constexpr int64_t kBytesBeyondL2 = 3 << 20;
// With fewer rows of the batch, the products with the input are made for many
// steps at once, so each step reads only the weights for h.
constexpr int64_t kRowsWorthInputInSteps = 32;
constexpr int64_t kBytesOfAChunk = 512 << 10; // of products, to stay in L2

// A panel has the weights of some hidden units: [features, kGates,
// units_per_panel].
struct SequenceForwardPlan : SequencePlan {
  explicit SequenceForwardPlan(const SequencePlan& plan) : SequencePlan(plan) {}

  int64_t panel_width; // kGates * units_per_panel
  bool packs_weights;  // or reads them as they lie
  // The products with the input are computed for all steps of a chunk, before
  // the first of them runs. Else each step does it, and all are one chunk.
  bool multiplies_input_first;
  std::vector<SequenceChunk> chunks;
  int64_t rows_per_slot; // of a step
  // Products are kept of so many rows for each panel, or else for each slot.
  int64_t product_buffers;
  int64_t rows_per_product;
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
SequenceForwardPlan plan_of(const SequenceForwardPointers<scalar_t>& p) {
  const auto& sizes = p.sizes;
  const int64_t steps = p.steps.size();
  SequenceForwardPlan plan(plan_of(
      sizes,
      steps,
      p.has_batch_sizes,
      units_per_panel<gemm_t>(sizes.state_size),
      2 * kGates * sizes.features(),
      available_threads()));
  plan.panel_width = kGates * plan.units_per_panel;
  using opmath_t = at::opmath_type<scalar_t>;
  const int64_t bytes_of_a_row =
      plan.panels * plan.panel_width * sizeof(opmath_t);
  plan.packs_weights = !std::is_same_v<scalar_t, opmath_t> || sizes.batch > 2 ||
      steps >= kStepsOfFewRowsWorthPacking ||
      sizes.state_size * bytes_of_a_row < kBytesBeyondL2;
  // If threads divide the rows, a step multiplies its input when it runs.
  plan.multiplies_input_first = sizes.input_features > 0 &&
      plan.row_groups == 1 && sizes.batch < kRowsWorthInputInSteps;
  plan.chunks = sequence_chunks(
      p.steps,
      plan.multiplies_input_first ? kBytesOfAChunk / bytes_of_a_row
                                  : std::numeric_limits<int64_t>::max());
  plan.rows_per_slot = at::divup(sizes.batch, plan.row_groups);
  plan.product_buffers =
      plan.multiplies_input_first ? plan.panels : plan.slots();
  plan.rows_per_product =
      plan.multiplies_input_first ? most_rows(plan.chunks) : plan.rows_per_slot;
  return plan;
}

// products = [old_h, input] @ weights.T, panel by panel. Those of a panel
// become gates and new states while they are in the cache.
template <typename scalar_t, typename gemm_t>
class SequenceForward {
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;

  const SequenceForwardPointers<scalar_t>& p_;
  const SequenceForwardPlan plan_;
  const Converted<scalar_t, opmath_t> bias_;
  Panels<gemm_t> weights_;
  Scratch<opmath_t>
      products_;          // [product_buffers, rows_per_product, panel_width]
  Scratch<gemm_t> old_h_; // [slots, rows_per_slot, state_size]
  Scratch<gemm_t> input_; // [slots, rows, input_features], if converted

 public:
  explicit SequenceForward(const SequenceForwardPointers<scalar_t>& pointers)
      : p_(pointers),
        plan_(plan_of<scalar_t, gemm_t>(p_)),
        bias_(p_.bias, p_.sizes.gate_units()),
        weights_(
            plan_.packs_weights ? p_.sizes.features() : 0,
            plan_.panels * plan_.panel_width,
            plan_.panel_width),
        products_(
            plan_.product_buffers * plan_.rows_per_product * plan_.panel_width),
        old_h_(plan_.slots() * plan_.rows_per_slot * p_.sizes.state_size),
        input_(
            kConverts ? plan_.slots() * plan_.rows_per_product *
                    p_.sizes.input_features
                      : 0) {}

  void run() {
    RECORD_USER_SCOPE(name_of_plan<gemm_t>(plan_));
    run_together(
        plan_.slots(), [&](int64_t begin, int64_t end, Barrier& barrier) {
          const ProductGuard<gemm_t> guard;
          run_slots(begin, end, barrier);
        });
  }

 private:
  void run_slots(int64_t begin, int64_t end, Barrier& barrier) {
    for (auto slot = begin; plan_.packs_weights && slot < end; ++slot) {
      pack_weights(slot);
    }
    if (!barrier.wait(end - begin)) {
      return;
    }
    for (const auto& chunk : plan_.chunks) {
      for (auto slot = begin; plan_.multiplies_input_first && slot < end;
           ++slot) {
        multiply_input(slot, chunk);
      }
      for (auto i = chunk.begin; i < chunk.end; ++i) {
        for (auto slot = begin; slot < end; ++slot) {
          run_step(slot, i, chunk);
        }
        if (plan_.needs_barrier() && !barrier.wait(end - begin)) {
          return;
        }
      }
    }
  }

  // All slots share all panels, also where they divide only rows.
  void pack_weights(int64_t slot) {
    const Share panels(plan_.panels, slot, plan_.slots());
    for (auto panel = panels.begin; panel < panels.end; ++panel) {
      for (int64_t gate = 0; gate < kGates; ++gate) {
        weights_.template pack_transposed<scalar_t>(
            panel,
            gate * plan_.units_per_panel,
            0,
            weights_of(panel, gate),
            plan_.units_in(panel),
            p_.sizes.features());
      }
    }
  }

  // The weights of a gate of a panel's units, as they lie: [units, features].
  Matrix<const scalar_t> weights_of(int64_t panel, int64_t gate) const {
    const auto row = gate * p_.sizes.state_size + panel * plan_.units_per_panel;
    const auto features = p_.sizes.features();
    return {p_.weights + row * features, features};
  }

  void multiply_input(int64_t slot, const SequenceChunk& chunk) {
    const auto input = input_rows(slot, chunk.first_row, chunk.rows);
    plan_.for_each_panel(slot, 0, [&](int64_t panel) {
      multiply_panel(
          panel,
          chunk.rows,
          input,
          p_.sizes.state_size,
          products_of(panel, 0),
          /*accumulate=*/false);
    });
  }

  // Rows of the input, which are converted in each chunk or step, so that
  // memory does not grow with time.
  Matrix<const gemm_t>
  input_rows(int64_t slot, int64_t first_row, int64_t rows) {
    const auto input_features = p_.sizes.input_features;
    const Matrix<const scalar_t> from{
        p_.input + first_row * input_features, input_features};
    if constexpr (kConverts) {
      const Matrix<gemm_t> to{
          input_.data() + slot * plan_.rows_per_product * input_features,
          input_features};
      run_with_best_isa(
          ConvertRows<scalar_t, gemm_t>{from, input_features, to}, 0, rows);
      return to;
    } else {
      return from;
    }
  }

  // The products of a panel or a slot, from a row on.
  Matrix<opmath_t> products_of(int64_t buffer, int64_t row) {
    const auto at = buffer * plan_.rows_per_product + row;
    return {products_.data() + at * plan_.panel_width, plan_.panel_width};
  }

  void run_step(int64_t slot, int64_t i, const SequenceChunk& chunk) {
    const auto size = p_.sizes.state_size;
    const bool has_input = p_.sizes.input_features > 0;
    const auto rows = plan_.rows_of_slot(slot, p_.steps[i].rows);
    const auto first_row = p_.steps[i].first_row + rows.begin;
    p_.reset(i, rows, plan_.units_of_slot(slot));
    const Matrix<gemm_t> old_h{
        old_h_.data() + slot * plan_.rows_per_slot * size, size};
    copy_old_h(p_, i, rows, old_h.data);
    Matrix<const gemm_t> input{};
    if (!plan_.multiplies_input_first) {
      input = input_rows(slot, first_row, rows.size());
    }
    plan_.for_each_panel(slot, i, [&](int64_t panel) {
      const auto products = plan_.multiplies_input_first
          ? products_of(panel, first_row - chunk.first_row)
          : products_of(slot, 0);
      if (!plan_.multiplies_input_first && has_input) {
        multiply_panel(panel, rows.size(), input, size, products, false);
      }
      multiply_panel(panel, rows.size(), old_h, 0, products, has_input);
      write_states(i, panel, rows, products);
    });
  }

  // products [rows, kGates, units_per_panel] = or += A @ weights of a panel. A,
  // [rows, ld], is old_h or the input, whose features begin at first_feature.
  void multiply_panel(
      int64_t panel,
      int64_t rows,
      Matrix<const gemm_t> A,
      int64_t first_feature,
      Matrix<opmath_t> products,
      bool accumulate) const {
    Operands<gemm_t> operands{
        .M = rows,
        .N = plan_.panel_width,
        .K = A.ld,
        .A = A,
        .B = {},
        .C = products,
        .accumulate = accumulate,
        .several_chains = rows <= 2};
    if (plan_.packs_weights) {
      operands.B = weights_.panel(panel, first_feature);
      return multiply(operands);
    }
    if constexpr (std::is_same_v<scalar_t, opmath_t>) {
      for (int64_t gate = 0; gate < kGates; ++gate) {
        operands.N = plan_.units_in(panel);
        operands.B = weights_of(panel, gate).part(0, first_feature);
        operands.C = products.part(0, gate * plan_.units_per_panel);
        dot(operands);
      }
    }
  }

  void write_states(
      int64_t i,
      int64_t panel,
      const Share& rows,
      Matrix<opmath_t> products) const {
    const auto unit = panel * plan_.units_per_panel;
    run_with_best_isa(
        PointwiseForward<scalar_t>{
            .pointers = p_.cell_of_step(i, bias_.data()),
            .products = products.data,
            .ld = plan_.units_per_panel,
            .first_row = rows.begin,
            .first_unit = unit,
            .end_unit = unit + plan_.units_in(panel)},
        0,
        rows.size());
  }
};

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
