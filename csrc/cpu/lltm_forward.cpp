#include "cpu/lltm_cell.h"

#include "cpu/primitives/dot.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/product.h"
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
#include <string>
#include <type_traits>

// lltm::forward on the CPU, from its tensors (at the end of the file) to the
// products of a block of hidden units. Weights are read as they lie, because a
// step uses them once; to pack them, as a sequence does, would take longer.
namespace lltm {

namespace {

// A batch of so many rows is multiplied by dot(), and not packed.
constexpr int64_t kRowsOfDot = 8;
// With so many rows, bfloat16 is converted to float; with more it is multiplied
// in pairs.
constexpr int64_t kRowsWithoutPairs = 2;

// What a block of hidden units reads and writes stays in the cache; so a block
// has fewer if its weights are converted.
constexpr int64_t kUnitsOfABlock = 128;
constexpr int64_t kConvertedUnitsOfABlock = 48;
// Panels that use weights together, at most: the products of all are kept.
constexpr int64_t kPanelsOfATask = 8;

// Rows of the batch are packed in panels. A small batch, or so few rows beyond
// the panels that they fill half a register or less, are left over for dot().
struct ForwardPlan {
  int64_t leftover_rows;
  int64_t packed_rows;
  int64_t rows_per_panel;
  int64_t panels;
  int64_t units_per_block;
  int64_t blocks;
  int64_t panels_per_task;
  int64_t tasks_per_block;

  std::string to_string() const {
    return c10::str(
        panels,
        " panels of rows, ",
        leftover_rows,
        " rows by dot, ",
        blocks,
        " blocks of units");
  }
};

template <typename scalar_t, typename gemm_t>
ForwardPlan plan_of(const CellSizes& sizes, int64_t threads) {
  constexpr bool has_dot = kPair<gemm_t> == 1;
  constexpr auto most_units = std::is_same_v<scalar_t, gemm_t>
      ? kUnitsOfABlock
      : kConvertedUnitsOfABlock;
  const auto multiple = column_multiple<gemm_t>();
  const auto beyond = sizes.batch % multiple;
  const auto leftover_rows = !has_dot ? 0
      : sizes.batch <= kRowsOfDot     ? sizes.batch
      : beyond <= multiple / 2        ? beyond
                                      : 0;
  const auto packed_rows = sizes.batch - leftover_rows;
  const auto rows_per_panel = panel_width<gemm_t>(packed_rows);
  const auto panels =
      packed_rows == 0 ? 0 : at::divup(packed_rows, rows_per_panel);
  const auto units_per_block = size_of_a_block(sizes.state_size, most_units);
  const auto blocks = at::divup(sizes.state_size, units_per_block);
  // So many that every thread has a task.
  const auto panels_per_task = std::clamp<int64_t>(
      at::divup(panels, at::divup(threads, blocks)), 1, kPanelsOfATask);
  return {
      .leftover_rows = leftover_rows,
      .packed_rows = packed_rows,
      .rows_per_panel = rows_per_panel,
      .panels = panels,
      .units_per_block = units_per_block,
      .blocks = blocks,
      .panels_per_task = panels_per_task,
      .tasks_per_block =
          std::max<int64_t>(1, at::divup(panels, panels_per_task))};
}

// Computes products.T = weights @ [old_h, input].T, in blocks of hidden units.
// Weights are read as they lie, or converted. They are the left operand, except
// in dot(), whose products lie by rows. The gates of a block are computed while
// its products are in the cache.
template <typename scalar_t, typename gemm_t>
class Forward {
 public:
  explicit Forward(const ForwardPointers<scalar_t>& pointers)
      : p_(pointers),
        plan_(plan_of<scalar_t, gemm_t>(p_.sizes, at::get_num_threads())),
        features_(p_.sizes.features()),
        ld_leftover_(round_up(plan_.units_per_block, 16)),
        panels_(features_, plan_.packed_rows, plan_.rows_per_panel),
        leftover_(plan_.leftover_rows * features_) {}

  void run() {
    RECORD_USER_SCOPE(name_of_plan<gemm_t>(plan_));
    pack();
    at::parallel_for(
        0,
        plan_.blocks * plan_.tasks_per_block,
        grain_size(nanoseconds_of_a_block() / plan_.tasks_per_block),
        [&](int64_t begin, int64_t end) {
          const ProductGuard<gemm_t> guard;
          Scratch<opmath_t> products(
              kGates * plan_.units_per_block * plan_.panels_per_task *
              plan_.rows_per_panel);
          Scratch<opmath_t> leftover_products(
              kGates * ld_leftover_ * plan_.leftover_rows);
          Scratch<gemm_t> converted(
              kConverts ? plan_.units_per_block * features_ : 0);
          for (auto task = begin; task < end; ++task) {
            one_task(
                task,
                products.data(),
                leftover_products.data(),
                converted.data());
          }
        });
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;

  // What a task computes: a block of units, for some panels and leftover rows.
  struct Block {
    int64_t first_unit;
    int64_t units;
    int64_t first_panel;
    int64_t end_panel;
    int64_t leftover_rows;
    opmath_t* products;          // [panels, kGates, units, width]
    opmath_t* leftover_products; // [rows, kGates, ld_leftover]
  };

  // To read a byte of the weights takes as long as to multiply a row by it.
  int64_t nanoseconds_of_a_block() const {
    const int64_t rows = p_.sizes.batch + sizeof(scalar_t);
    return 2 * kGates * plan_.units_per_block * features_ * rows /
        kFlopPerNanosecond;
  }

  void pack() {
    const auto H = p_.sizes.state_size;
    const auto I = p_.sizes.input_features;
    copy_leftover(p_.old_h, 0, H);
    copy_leftover(p_.input, H, I);
    at::parallel_for(
        0,
        plan_.panels,
        grain_size(features_ * plan_.rows_per_panel / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (auto panel = begin; panel < end; ++panel) {
            pack(panel, p_.old_h, 0, H);
            pack(panel, p_.input, H, I);
          }
        });
  }

  void copy_leftover(const scalar_t* from, int64_t feature, int64_t size) {
    run_with_best_isa(
        ConvertRows<scalar_t, gemm_t>{
            {from + plan_.packed_rows * size, size},
            size,
            {leftover_.data() + feature, features_}},
        0,
        plan_.leftover_rows);
  }

  // Packs old_h or input, whose features begin at first_feature.
  void pack(
      int64_t panel,
      const scalar_t* from,
      int64_t first_feature,
      int64_t size) {
    panels_.template pack_transposed<scalar_t>(
        panel,
        0,
        first_feature,
        {from + panel * plan_.rows_per_panel * size, size},
        panels_.columns(panel),
        size);
  }

  int64_t columns_to_multiply(int64_t panel) const {
    return round_up(panels_.columns(panel), column_multiple<gemm_t>());
  }

  void one_task(
      int64_t task,
      opmath_t* products,
      opmath_t* leftover_products,
      gemm_t* converted) const {
    const auto first_unit =
        task / plan_.tasks_per_block * plan_.units_per_block;
    const auto first_panel =
        task % plan_.tasks_per_block * plan_.panels_per_task;
    const auto end_panel = first_panel + plan_.panels_per_task;
    const Block block{
        .first_unit = first_unit,
        .units =
            std::min(plan_.units_per_block, p_.sizes.state_size - first_unit),
        .first_panel = first_panel,
        .end_panel = std::min(end_panel, plan_.panels),
        .leftover_rows = end_panel < plan_.panels ? 0 : plan_.leftover_rows,
        .products = products,
        .leftover_products = leftover_products};
    for (int64_t gate = 0; gate < kGates; ++gate) {
      multiply_gate(block, gate, converted);
    }
    for (auto panel = block.first_panel; panel < block.end_panel; ++panel) {
      write_panel(block, panel);
    }
    write_gates(
        block,
        plan_.packed_rows,
        block.leftover_rows,
        leftover_products,
        ld_leftover_);
  }

  void multiply_gate(const Block& block, int64_t gate, gemm_t* converted)
      const {
    const auto weights = weights_of(block, gate, converted);
    for (auto panel = block.first_panel; panel < block.end_panel; ++panel) {
      multiply<gemm_t>(
          {.M = block.units,
           .N = columns_to_multiply(panel),
           .K = features_,
           .A = weights,
           .B = panels_.panel(panel),
           .C = products_of(block, panel, gate),
           .accumulate = false,
           .several_chains = false});
    }
    if constexpr (kPair<gemm_t> == 1) {
      if (block.leftover_rows > 0) {
        dot<gemm_t>( // A @ B.T, so here the weights are B
            {.M = block.leftover_rows,
             .N = block.units,
             .K = features_,
             .A = {leftover_.data(), features_},
             .B = weights,
             .C =
                 {block.leftover_products + gate * ld_leftover_,
                  kGates * ld_leftover_},
             .accumulate = false,
             .several_chains = false});
      }
    }
  }

  Matrix<opmath_t> products_of(const Block& block, int64_t panel, int64_t gate)
      const {
    const auto i = kGates * (panel - block.first_panel) + gate;
    const auto width = plan_.rows_per_panel;
    return {block.products + i * block.units * width, width};
  }

  // The rows of weights of a block's units.
  Matrix<const gemm_t>
  weights_of(const Block& block, int64_t gate, gemm_t* converted) const {
    const auto from = Matrix<const scalar_t>{p_.weights, features_}.part(
        gate * p_.sizes.state_size + block.first_unit, 0);
    if constexpr (kConverts) {
      const Matrix<gemm_t> to{converted, features_};
      run_with_best_isa(
          ConvertRows<scalar_t, gemm_t>{from, features_, to}, 0, block.units);
      return to;
    } else {
      return from;
    }
  }

  // From [kGates, units, rows] to [rows, kGates, units], some rows at a time.
  void write_panel(const Block& block, int64_t panel) const {
    constexpr int64_t at_once = 16;
    alignas(64) opmath_t rows_of_products[at_once * kGates * kUnitsOfABlock];
    const auto ld = round_up(block.units, 16);
    for (int64_t row = 0; row < panels_.columns(panel); row += at_once) {
      const auto size = std::min(at_once, panels_.columns(panel) - row);
      for (int64_t gate = 0; gate < kGates; ++gate) {
        run_with_best_isa(
            Transpose<opmath_t, opmath_t>{
                .from = products_of(block, panel, gate).part(0, row),
                .rows = block.units,
                .to = {rows_of_products + gate * ld, kGates * ld}},
            0,
            size);
      }
      write_gates(
          block,
          panel * plan_.rows_per_panel + row,
          size,
          rows_of_products,
          ld);
    }
  }

  // From products [rows, kGates, ld].
  void write_gates(
      const Block& block,
      int64_t first_row,
      int64_t rows,
      const opmath_t* products,
      int64_t ld) const {
    run_with_best_isa(
        Gates<scalar_t>{
            .pointers = p_.cell,
            .products = products,
            .ld = ld,
            .first_row = first_row,
            .first_unit = block.first_unit,
            .end_unit = block.first_unit + block.units},
        0,
        rows);
  }

  const ForwardPointers<scalar_t>& p_;
  const ForwardPlan plan_;
  const int64_t features_;
  const int64_t ld_leftover_;
  Panels<gemm_t> panels_;
  Scratch<gemm_t> leftover_; // [rows, features]
};

} // namespace

template <typename scalar_t>
void cell_forward(const ForwardPointers<scalar_t>& pointers) {
  const bool pairs_fit = pointers.sizes.batch > kRowsWithoutPairs &&
      pointers.sizes.has_whole_pairs();
  with_gemm_type<scalar_t>(pairs_fit, [&](auto gemm) {
    Forward<scalar_t, decltype(gemm)>(pointers).run();
  });
}
template void cell_forward(const ForwardPointers<double>&);
template void cell_forward(const ForwardPointers<float>&);
template void cell_forward(const ForwardPointers<c10::Half>&);
template void cell_forward(const ForwardPointers<c10::BFloat16>&);

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
        using opmath_t = at::opmath_type<scalar_t>;
        const Converted<scalar_t, opmath_t> bias_in_opmath(
            bias->const_data_ptr<scalar_t>(), kGates * state_size);
        const Converted<scalar_t, opmath_t> old_cell_in_opmath(
            old_cell->const_data_ptr<scalar_t>(), batch * state_size);
        cell_forward<scalar_t>({
            .sizes = {batch, a.input.size(1), state_size},
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .old_h = old_h->const_data_ptr<scalar_t>(),
            .cell =
                {.state_size = state_size,
                 .math = CellMath<opmath_t>(a),
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

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("forward", as_kernel<without_gates<forward_kernel_impl<false>>>());
  m.impl("_forward_with_gates", as_kernel<forward_kernel_impl<true>>());
}

} // namespace lltm
