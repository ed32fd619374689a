#include "cpu/lltm_forward.h"

#include "cpu/primitives/dot.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/scratch.h"
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
// products of a block of hidden units. Weights are read as they lie, because a
// step uses them once; to pack them, as a sequence does, would take 1.6 times
// as long at 64x256x512 on the Xeon.
namespace lltm {

namespace {

// A batch of so many rows or fewer is copied as rows [old_h, input] for dot(),
// and not packed. Of a larger one, only the rows beyond whole registers are, if
// they fill half a register or less. Pairs of bfloat16 are all packed.
constexpr int64_t kFewRows = 8;

// Computes products.T = weights @ [old_h, input].T, in blocks of hidden units.
// Weights are read as they lie, or converted; they are the left operand. The
// gates of a block are computed while its products are in the cache.
template <typename scalar_t, typename gemm_t>
class Forward {
 public:
  explicit Forward(const ForwardStep<scalar_t>& step)
      : a_(step),
        panels_(
            features_,
            packed_rows_,
            Product<gemm_t>::panel_width(packed_rows_)),
        rest_(rest_rows_ * features_),
        units_(units_per_block()),
        panels_at_once_(panels_at_once()) {}

  void run() const {
    pack();
    const auto panel_blocks =
        std::max<int64_t>(1, at::divup(panels_.count(), panels_at_once_));
    at::parallel_for(
        0,
        at::divup(a_.sizes.state_size, units_) * panel_blocks,
        grain_size(nanoseconds_of(units_) / panel_blocks),
        [&](int64_t begin, int64_t end) {
          const typename Product<gemm_t>::Guard guard;
          const Scratch<opmath_t> products(
              kGates * units_ * panels_at_once_ * panels_.width());
          const Scratch<opmath_t> rest_products(kGates * ld_rest_ * rest_rows_);
          const Scratch<gemm_t> converted(
              kConverts ? kGates * units_ * kFeaturesAtOnce : 0);
          for (auto task = begin; task < end; ++task) {
            const auto panel = task % panel_blocks * panels_at_once_;
            const auto end_panel = panel + panels_at_once_;
            one_block(
                {.first_unit = task / panel_blocks * units_,
                 .first_panel = panel,
                 .end_panel = std::min(end_panel, panels_.count()),
                 .rest_rows = end_panel < panels_.count() ? 0 : rest_rows_,
                 .products = products.data(),
                 .rest_products = rest_products.data(),
                 .converted = converted.data()});
          }
        });
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;
  // Hidden units of a block, at most; fewer if their weights are converted, so
  // that they stay in the cache.
  static constexpr int64_t kMaxUnits = kConverts ? 48 : 128;
  static constexpr bool kHasDot = std::is_same_v<gemm_t, opmath_t>;
  // Features of a panel that are packed as one task, and that all panels are
  // multiplied with before the next ones, so that the weights stay in the
  // cache.
  static constexpr int64_t kFeaturesAtOnce = Product<gemm_t>::kTermsOfAChain;

  // What a task computes: a block of units, for some panels and the rest.
  struct Block {
    int64_t first_unit;
    int64_t first_panel;
    int64_t end_panel;
    int64_t rest_rows;
    opmath_t* products;      // [panels, kGates, units, width]
    opmath_t* rest_products; // [rows, kGates, ld_rest]
    gemm_t* converted;       // rows of weights
  };

  int64_t rest_rows() const {
    if (!kHasDot) {
      return 0;
    }
    const auto columns = Product<gemm_t>::column_multiple();
    const auto rest = a_.sizes.batch % columns;
    return a_.sizes.batch <= kFewRows ? a_.sizes.batch
        : rest <= columns / 2         ? rest
                                      : 0;
  }

  // To read a byte of the weights takes as long as to multiply a row by it.
  int64_t nanoseconds_of(int64_t units) const {
    const int64_t rows = a_.sizes.batch + sizeof(scalar_t);
    return 2 * kGates * units * features_ * rows / kFlopPerNanosecond;
  }

  // A block has many units, because each call of a product has a cost, and
  // fewer where threads would be idle.
  int64_t units_per_block() const {
    return size_of_a_block(a_.sizes.state_size, kMaxUnits);
  }

  // Few panels if there are few blocks of units, so that every thread has some;
  // and not many, because the products of all of them are kept.
  int64_t panels_at_once() const {
    const auto unit_blocks = at::divup(a_.sizes.state_size, units_);
    const auto panel_blocks = at::divup(at::get_num_threads(), unit_blocks);
    return std::clamp<int64_t>(at::divup(panels_.count(), panel_blocks), 1, 8);
  }

  void pack() const {
    const auto H = a_.sizes.state_size;
    const auto I = a_.sizes.input_features;
    copy_rest(a_.old_h, 0, H);
    copy_rest(a_.input, H, I);
    const auto parts = at::divup(features_, kFeaturesAtOnce);
    at::parallel_for(
        0,
        panels_.count() * parts,
        grain_size(kFeaturesAtOnce * panels_.width() / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (auto task = begin; task < end; ++task) {
            const auto first = task % parts * kFeaturesAtOnce;
            pack(task / parts, first, a_.old_h, 0, H);
            pack(task / parts, first, a_.input, H, I);
          }
        });
  }

  void copy_rest(const scalar_t* from, int64_t feature, int64_t size) const {
    vectorized(
        ConvertRows<scalar_t, gemm_t>{
            {from + packed_rows_ * size, size},
            size,
            {rest_.data() + feature, features_}},
        0,
        rest_rows_);
  }

  // Packs those of the kFeaturesAtOnce features from first on that come from
  // old_h or input, whose own features begin at offset.
  void pack(
      int64_t panel,
      int64_t first,
      const scalar_t* from,
      int64_t offset,
      int64_t size) const {
    const auto begin = std::max<int64_t>(first - offset, 0);
    const auto end = std::min(first + kFeaturesAtOnce - offset, size);
    const auto row = panel * panels_.width();
    if (begin < end) {
      panels_.template pack_transposed<scalar_t>(
          panel,
          0,
          offset,
          {from + row * size, size},
          panels_.columns(panel),
          columns_to_multiply(panel),
          begin,
          end);
    }
  }

  int64_t columns_to_multiply(int64_t panel) const {
    return round_up(panels_.columns(panel), Product<gemm_t>::column_multiple());
  }

  void one_block(const Block& block) const {
    const auto units = std::min(units_, a_.sizes.state_size - block.first_unit);
    // dot() divides the features by itself.
    const auto at_once =
        panels_.count() > 0 || kConverts ? kFeaturesAtOnce : features_;
    // The rows of the gates follow one another if a block has all units.
    const int64_t gates = units == a_.sizes.state_size ? kGates : 1;
    for (int64_t k = 0; k < features_; k += at_once) {
      for (int64_t gate = 0; gate < kGates; gate += gates) {
        add_products(
            block, units, gate, gates, k, std::min(at_once, features_ - k));
      }
    }
    for (auto panel = block.first_panel; panel < block.end_panel; ++panel) {
      write_panel(block, units, panel);
    }
    write_gates(
        packed_rows_,
        block.rest_rows,
        block.first_unit,
        units,
        block.rest_products,
        ld_rest_);
  }

  // Adds the products of some gates with features from k on.
  void add_products(
      const Block& block,
      int64_t units,
      int64_t first_gate,
      int64_t gates,
      int64_t k,
      int64_t features) const {
    const auto weights =
        weights_of(block, gates * units, first_gate, k, features);
    for (auto panel = block.first_panel; panel < block.end_panel; ++panel) {
      multiply<gemm_t>(
          {.M = gates * units,
           .N = columns_to_multiply(panel),
           .K = features,
           .A = weights,
           .B = panels_.panel(panel, k),
           .C = products_of(block, units, panel, first_gate),
           .accumulate = k > 0,
           .several_chains = false});
    }
    if constexpr (kHasDot) {
      for (int64_t i = 0; block.rest_rows > 0 && i < gates; ++i) {
        dot<gemm_t>( // A @ B.T, so here the weights are B
            {.M = block.rest_rows,
             .N = units,
             .K = features,
             .A = {rest_.data() + k, features_},
             .B = weights.part(i * units, 0),
             .C =
                 {block.rest_products + (first_gate + i) * ld_rest_,
                  kGates * ld_rest_},
             .accumulate = k > 0});
      }
    }
  }

  Matrix<opmath_t> products_of(
      const Block& block,
      int64_t units,
      int64_t panel,
      int64_t gate) const {
    const auto i = kGates * (panel - block.first_panel) + gate;
    return {block.products + i * units * panels_.width(), panels_.width()};
  }

  // Rows of weights, from the first unit of a gate and feature k on.
  Matrix<const gemm_t> weights_of(
      const Block& block,
      int64_t rows,
      int64_t gate,
      int64_t k,
      int64_t features) const {
    const auto from = Matrix<const scalar_t>{a_.weights, features_}.part(
        gate * a_.sizes.state_size + block.first_unit, k);
    if constexpr (kConverts) {
      const Matrix<gemm_t> to{block.converted, features};
      vectorized(ConvertRows<scalar_t, gemm_t>{from, features, to}, 0, rows);
      return to;
    } else {
      return from;
    }
  }

  // From [kGates, units, rows] to [rows, kGates, units], some rows at a time.
  void write_panel(const Block& block, int64_t units, int64_t panel) const {
    constexpr int64_t at_once = 16;
    alignas(64) opmath_t rows_of_products[at_once * kGates * kMaxUnits];
    const auto ld = round_up(units, 16);
    for (int64_t row = 0; row < panels_.columns(panel); row += at_once) {
      const auto size = std::min(at_once, panels_.columns(panel) - row);
      for (int64_t gate = 0; gate < kGates; ++gate) {
        vectorized(
            Transpose<opmath_t, opmath_t>{
                .from = products_of(block, units, panel, gate).part(0, row),
                .rows = units,
                .padded = units,
                .to = {rows_of_products + gate * ld, kGates * ld}},
            0,
            size);
      }
      write_gates(
          panel * panels_.width() + row,
          size,
          block.first_unit,
          units,
          rows_of_products,
          ld);
    }
  }

  // From products [rows, kGates, ld].
  void write_gates(
      int64_t first_row,
      int64_t rows,
      int64_t unit,
      int64_t units,
      const opmath_t* products,
      int64_t ld) const {
    vectorized(
        Gates<scalar_t>{
            .pointers = a_.pointers,
            .products = products,
            .ld = ld,
            .first_row = first_row,
            .first_unit = unit,
            .end_unit = unit + units},
        0,
        rows);
  }

  const ForwardStep<scalar_t>& a_;
  const int64_t features_ = a_.sizes.features();
  const int64_t rest_rows_ = rest_rows();
  const int64_t packed_rows_ = a_.sizes.batch - rest_rows_;
  const Panels<gemm_t> panels_;
  const Scratch<gemm_t> rest_; // [rows, features]
  const int64_t units_;
  const int64_t panels_at_once_;
  const int64_t ld_rest_ = round_up(units_, 16);
};

} // namespace

template <typename scalar_t>
void forward_step(const ForwardStep<scalar_t>& step) {
  const bool pairs_fit =
      step.sizes.batch > kFewRows && step.sizes.has_whole_pairs();
  with_gemm_type<scalar_t>(pairs_fit, [&](auto gemm) {
    Forward<scalar_t, decltype(gemm)>(step).run();
  });
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
    gates = empty_rows(kGates * state_size);
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
            bias->const_data_ptr<scalar_t>(), kGates * state_size);
        const InOpmath<scalar_t> old_cell_in_opmath(
            old_cell->const_data_ptr<scalar_t>(), batch * state_size);
        forward_step<scalar_t>({
            .sizes = {batch, a.input.size(1), state_size},
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .old_h = old_h->const_data_ptr<scalar_t>(),
            .pointers =
                {.state_size = state_size,
                 .math = CellMath<at::opmath_type<scalar_t>>(a),
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
