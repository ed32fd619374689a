#include "cpu/lltm_forward.h"

#include "cpu/lltm_forward_batch.h"
#include "cpu/primitives/dot.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/profiled_path.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"
#include "cpu/primitives/work.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"

#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>

// lltm::forward on the CPU, from its tensors (at the end of the file) to the
// products of a block of hidden units. It does not run SequenceForward for one
// step, because that packs the weights, and a step uses them once: on the Xeon
// 64x256x512 would take 1.6 times as long.
namespace lltm {

namespace {

// Hidden units of a block, at most.
constexpr int64_t kMaxUnits = 128;
constexpr int64_t kMaxUnitsOfDotProducts = 48;
// Products of a gate that a block computes for one panel, at most.
constexpr int64_t kProductsOfAGate = 4096;
// A task computes at most so many panels, because it keeps the products of all
// of them until the last feature.
constexpr int64_t kMaxPanelsPerTask = 8;

// Hidden units of a block, at least. With one panel and few units, threads
// would be idle. Half a vector of units is then worth a block if the step is
// long: on two threads of Zen 4, 64x2048x31 takes 25 % less time.
int64_t least_units(int64_t panels, int64_t nanoseconds) {
  return panels == 1 && nanoseconds >= 4 * kNanosecondsWorthAThread
      ? kVector / 2
      : kVector;
}

// Computes products.T = weights @ [old_h, input].T, in blocks of hidden units
// and panels of rows of the batch. Weights are read as they lie, and the panels
// are packed. The gates of a block are computed while its products lie in the
// cache.
template <typename scalar_t, typename gemm_t>
class Forward {
 public:
  explicit Forward(const ForwardStep<scalar_t>& step)
      : a_(step),
        batch_(step),
        units_(units_per_block()),
        panels_per_task_(panels_per_task()) {}

  void run() const {
    batch_.pack();
    const auto unit_blocks = at::divup(a_.sizes.state_size, units_);
    const auto panel_blocks =
        std::max<int64_t>(1, at::divup(batch_.panels(), panels_per_task_));
    const auto rows_per_task =
        panels_per_task_ * batch_.width(0) + batch_.rest_rows();
    at::parallel_for(
        0,
        unit_blocks * panel_blocks,
        grain_size(nanoseconds_of(units_, rows_per_task)),
        [&](int64_t begin, int64_t end) {
          const Scratch<opmath_t> products(products_per_task());
          const Scratch<gemm_t> weights(
              kConverts ? 3 * units_ * kMaxK<gemm_t> : 0);
          for (int64_t task = begin; task < end; ++task) {
            const auto panel = task % panel_blocks * panels_per_task_;
            one_block(
                {.first_unit = task / panel_blocks * units_,
                 .first_panel = panel,
                 .end_panel =
                     std::min(batch_.panels(), panel + panels_per_task_),
                 .has_rest = task % panel_blocks == panel_blocks - 1 &&
                     batch_.rest_rows() > 0},
                products.data(),
                weights.data());
          }
          release_gemm<gemm_t>();
        });
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;
  static constexpr auto kPairs = kPair<gemm_t>;

  // What a task computes: a block of units, for some panels.
  struct Block {
    int64_t first_unit;
    int64_t first_panel;
    int64_t end_panel;
    bool has_rest; // the rows that no panel holds
  };

  int64_t nanoseconds_of(int64_t units, int64_t rows) const {
    const auto weights = 3 * units * features_;
    return weights * int64_t(sizeof(scalar_t)) / kBytesPerNanosecond +
        2 * weights * rows / kFlopPerNanosecond;
  }

  // A block has many units, because each call of a product has a cost.
  int64_t units_per_block() const {
    if (batch_.panels() == 0) {
      return size_of_a_block(a_.sizes.state_size, kMaxUnitsOfDotProducts);
    }
    const auto most = std::min(kMaxUnits, kProductsOfAGate / batch_.width(0));
    const auto nanoseconds =
        nanoseconds_of(a_.sizes.state_size, batch_.width(0));
    return size_of_a_block(
        a_.sizes.state_size, most, least_units(batch_.panels(), nanoseconds));
  }

  // A task takes few panels if there are few blocks of units, so that every
  // thread has some.
  int64_t panels_per_task() const {
    const auto unit_blocks = at::divup(a_.sizes.state_size, units_);
    const auto panel_blocks = at::divup(at::get_num_threads(), unit_blocks);
    return std::clamp<int64_t>(
        at::divup(batch_.panels(), panel_blocks), 1, kMaxPanelsPerTask);
  }

  int64_t products_per_task() const {
    const auto rest = batch_.rest_rows() * 3 * ld_rest_;
    if (batch_.panels() == 0) {
      return rest;
    }
    // The last panel may be a register wider.
    const auto rows = batch_.panel_width() * panels_per_task_ + kVector;
    return rest + 3 * units_ * rows;
  }

  // The products of a panel. Those of a block are first the rest's, [rest_rows,
  // 3, ld_rest], then each panel's, [3 * units, width].
  opmath_t* products_of(
      int64_t panel,
      const Block& block,
      int64_t units,
      opmath_t* products) const {
    const auto rows =
        batch_.first_row(panel) - batch_.first_row(block.first_panel);
    return products + 3 * (batch_.rest_rows() * ld_rest_ + rows * units);
  }

  void one_block(const Block& block, opmath_t* products, gemm_t* converted)
      const {
    const auto units = std::min(units_, a_.sizes.state_size - block.first_unit);
    // The rows of the gates follow one another if a block has all units.
    const auto gates_at_once = units == a_.sizes.state_size ? 3 : 1;
    // All panels take these features before the next ones, so that the weights
    // stay in the cache. dot() divides the features by itself.
    const auto at_once =
        batch_.panels() > 0 || kConverts ? kMaxK<gemm_t> : features_;
    for (int64_t k = 0; k < features_; k += at_once) {
      const auto size_k = std::min(at_once, features_ - k);
      for (int64_t gate = 0; gate < 3; gate += gates_at_once) {
        const auto row = gate * a_.sizes.state_size + block.first_unit;
        multiply(
            block,
            units,
            gate,
            gates_at_once,
            k,
            size_k,
            weights_of(row, gates_at_once * units, k, size_k, converted),
            products);
      }
    }
    for (auto panel = block.first_panel; panel < block.end_panel; ++panel) {
      write_panel(
          panel,
          block.first_unit,
          units,
          products_of(panel, block, units, products));
    }
    if (block.has_rest) {
      write_rows(
          batch_.packed_rows(),
          batch_.rest_rows(),
          block.first_unit,
          units,
          products,
          ld_rest_);
    }
  }

  // Rows of weights, from feature k on: as they lie, or converted.
  Matrix<const gemm_t> weights_of(
      int64_t row,
      int64_t rows,
      int64_t k,
      int64_t size_k,
      gemm_t* converted) const {
    const Matrix<const scalar_t> weights{a_.weights, features_};
    if constexpr (kConverts) {
      const Matrix<gemm_t> to{converted, size_k};
      vectorized<ConvertRows<scalar_t, gemm_t>>(
          {weights.part(row, k), size_k, to}, 0, rows);
      return to;
    } else {
      return weights.part(row, k);
    }
  }

  // Adds the products of features from k on, with the weights of some gates.
  void multiply(
      const Block& block,
      int64_t units,
      int64_t first_gate,
      int64_t gates_at_once,
      int64_t k,
      int64_t size_k,
      Matrix<const gemm_t> weights,
      opmath_t* products) const {
    for (auto panel = block.first_panel; panel < block.end_panel; ++panel) {
      const Matrix<opmath_t> products_of_panel{
          products_of(panel, block, units, products), batch_.width(panel)};
      // oneDNN multiplies pairs, and float32 with AVX-512. Else the tile does.
      gemm<gemm_t>(
          batch_.method(),
          {.M = gates_at_once * units,
           .N = batch_.width(panel),
           .K = size_k,
           .A = weights,
           .B = batch_.panel(panel, k),
           .C = products_of_panel.part(first_gate * units, 0),
           .accumulate = k > 0,
           .all_rows = 3 * a_.sizes.state_size});
    }
    if constexpr (kPairs == 1) { // pairs leave no rest
      for (int64_t i = 0; block.has_rest && i < gates_at_once; ++i) {
        dot<gemm_t>( // A @ B.T, so here the weights are B
            {.M = batch_.rest_rows(),
             .N = units,
             .K = size_k,
             .A = batch_.rest().part(0, k),
             .B = weights.part(i * units, 0),
             .C = {products + (first_gate + i) * ld_rest_, 3 * ld_rest_},
             .accumulate = k > 0});
      }
    }
  }

  void write_panel(
      int64_t panel,
      int64_t first_unit,
      int64_t units,
      const opmath_t* products) const {
    alignas(64) opmath_t rows_of_products[kVector * 3 * kMaxUnits];
    const auto ld = round_up(units, kVector);
    const auto width = batch_.width(panel);
    for (int64_t row = 0; row < batch_.rows(panel); row += kVector) {
      const auto size = std::min(kVector, batch_.rows(panel) - row);
      // From [units, rows] of each gate to [rows, 3 * units].
      for (int64_t gate = 0; gate < 3; ++gate) {
        vectorized<Transpose<opmath_t, opmath_t>>(
            {.from = {products + gate * units * width + row, width},
             .columns = units,
             .padded = units,
             .to = {rows_of_products + gate * ld, 3 * ld}},
            0,
            size);
      }
      write_rows(
          batch_.first_row(panel) + row,
          size,
          first_unit,
          units,
          rows_of_products,
          ld);
    }
  }

  // From products [rows, 3, ld].
  void write_rows(
      int64_t first_row,
      int64_t rows,
      int64_t first_unit,
      int64_t units,
      const opmath_t* products,
      int64_t ld) const {
    vectorized<Gates<scalar_t>>(
        {.pointers = a_.pointers,
         .products = products,
         .ld = ld,
         .first_row = first_row,
         .first_unit = first_unit,
         .end_unit = first_unit + units},
        0,
        rows);
  }

  const ForwardStep<scalar_t>& a_;
  const int64_t features_ = a_.sizes.features();
  const PackedBatch<scalar_t, gemm_t> batch_;
  const int64_t units_;
  const int64_t panels_per_task_;
  const int64_t ld_rest_ = round_up(units_, kVector);
};

} // namespace

// Paths record their names for the profiler, here and for all other operators.
template <typename scalar_t>
void forward_step(const ForwardStep<scalar_t>& step) {
  if constexpr (kPair<scalar_t> == 2) { // dot() multiplies no pairs
    if (step.sizes.batch > kRowsOfDotProducts && step.sizes.has_whole_pairs() &&
        has_bfloat16_gemm()) {
      const ProfiledPath path("lltm::forward_gemm_bfloat16");
      return Forward<scalar_t, scalar_t>(step).run();
    }
  }
  const ProfiledPath path("lltm::forward_gemm");
  Forward<scalar_t, at::opmath_type<scalar_t>>(step).run();
}

template void forward_step(const ForwardStep<double>&);
template void forward_step(const ForwardStep<float>&);
template void forward_step(const ForwardStep<c10::Half>&);
template void forward_step(const ForwardStep<c10::BFloat16>&);

namespace {

template <bool write_gates>
ForwardWithGatesResult forward_kernel_impl(const ForwardArguments& a) {
  check_arguments(a);
  const auto batch = a.input.size(0);
  const auto state_size = a.old_h.size(1);
  // at::empty() ends in this call. Its dispatch would take a 30th of the
  // smallest call.
  const auto empty_rows = [&](int64_t columns) {
    return at::Tensor(
        at::detail::empty_cpu({batch, columns}, a.input.options()));
  };
  at::Tensor new_h = empty_rows(state_size);
  at::Tensor new_cell = empty_rows(state_size);
  at::Tensor gates;
  if constexpr (write_gates) {
    gates = empty_rows(3 * state_size);
  }
  if (batch == 0 || state_size == 0) {
    return {std::move(new_h), std::move(new_cell), std::move(gates)};
  }
  const auto input = a.input.expect_contiguous();
  const auto weights = a.weights.expect_contiguous();
  const auto bias = a.bias.expect_contiguous();
  const auto old_h = a.old_h.expect_contiguous();
  const auto old_cell = a.old_cell.expect_contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, a.input.scalar_type(), "lltm_forward_cpu", [&] {
        const InOpmath<scalar_t> bias_in_opmath(
            bias->const_data_ptr<scalar_t>(), 3 * state_size);
        const InOpmath<scalar_t> old_cell_in_opmath(
            old_cell->const_data_ptr<scalar_t>(), batch * state_size);
        forward_step<scalar_t>({
            .sizes = {batch, a.input.size(1), state_size},
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .old_h = old_h->const_data_ptr<scalar_t>(),
            .pointers =
                {.state_size = state_size,
                 .bias = bias_in_opmath.data(),
                 .old_cell = old_cell_in_opmath.data(),
                 .next_cell = nullptr,
                 .new_h = new_h.mutable_data_ptr<scalar_t>(),
                 .new_cell = new_cell.mutable_data_ptr<scalar_t>(),
                 .gates = write_gates ? gates.mutable_data_ptr<scalar_t>()
                                      : nullptr},
        });
      });
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

ForwardResult forward_kernel(const ForwardArguments& arguments) {
  return without_gates(forward_kernel_impl<false>(arguments));
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("forward", as_kernel<forward_kernel>());
  m.impl("_forward_with_gates", as_kernel<forward_kernel_impl<true>>());
}

} // namespace lltm
