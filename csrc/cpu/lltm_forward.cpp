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

// lltm::forward on the CPU, from its tensors to the products of a block of
// hidden units. Weights are read as they lie, because a step uses them once; to
// pack them, as a sequence does, would take longer.
namespace lltm {

namespace {

template <bool with_gates>
ForwardWithGatesResult forward_kernel_impl(const ForwardArguments& a) {
  check_arguments(a);
  const auto batch = a.input.size(0);
  const auto state_size = a.old_h.size(1);
  // at::empty() ends in this call. Its dispatch would take a 30th of the
  // smallest call.
  const auto empty = [&](int64_t columns) {
    return at::Tensor(
        at::detail::empty_cpu({batch, columns}, a.input.options()));
  };
  at::Tensor new_h = empty(state_size);
  at::Tensor new_cell = empty(state_size);
  at::Tensor gates = with_gates ? empty(kGates * state_size) : at::Tensor();
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
                 .gates =
                     with_gates ? gates.mutable_data_ptr<scalar_t>() : nullptr},
        });
      });
  return {std::move(new_h), std::move(new_cell), std::move(gates)};
}

template <typename scalar_t, typename gemm_t>
class Forward;

} // namespace

// With so many rows, bfloat16 is converted to float; with more it is multiplied
// in pairs.
constexpr int64_t kRowsWithoutPairs = 2;

template <typename scalar_t>
void cell_forward(const ForwardPointers<scalar_t>& pointers) {
  const bool pairs_fit = pointers.sizes.batch > kRowsWithoutPairs &&
      pointers.sizes.has_whole_pairs();
  with_gemm_type<scalar_t>(pairs_fit, [&](auto gemm) {
    Forward<scalar_t, decltype(gemm)>(pointers).run();
  });
}

namespace {

// A batch of so many rows is multiplied by dot(), and not packed.
constexpr int64_t kRowsOfDot = 12;
// What a block of hidden units reads and writes stays in the cache; so a block
// has fewer if its weights are converted.
constexpr int64_t kUnitsOfABlock = 128;
constexpr int64_t kConvertedUnitsOfABlock = 48;
// Panels that use weights together, at most: the products of all are kept.
constexpr int64_t kPanelsOfATask = 8;

// The first rows of the batch are packed in panels. Those of a small batch, or
// so few beyond whole registers that they fill half a one or less, are
// multiplied by dot().
struct ForwardPlan {
  int64_t packed_rows;
  int64_t dot_rows;
  int64_t rows_per_panel;
  int64_t panels;
  int64_t units_per_block;
  int64_t blocks;
  int64_t ld_products; // units, with the padding that Transpose writes
  // A task is some panels by one block. The last of a block has the dot_rows.
  int64_t panels_per_task;
  int64_t tasks_per_block;
  int64_t rows_per_task; // at most
  int64_t nanoseconds_per_task;

  std::string to_string() const {
    return c10::str(
        panels,
        " panels of rows, ",
        dot_rows,
        " rows by dot, ",
        blocks,
        " blocks of units");
  }
};

template <typename scalar_t, typename gemm_t>
ForwardPlan plan_of(const CellSizes& sizes, int64_t threads) {
  constexpr bool has_dot = kPair<gemm_t> == 1;
  const auto multiple = column_multiple<gemm_t>();
  const auto beyond = sizes.batch % multiple;
  const auto dot_rows = !has_dot  ? 0
      : sizes.batch <= kRowsOfDot ? sizes.batch
      : beyond <= multiple / 2    ? beyond
                                  : 0;
  const auto packed_rows = sizes.batch - dot_rows;
  const auto rows_per_panel = panel_width<gemm_t>(packed_rows);
  const auto panels =
      packed_rows == 0 ? 0 : at::divup(packed_rows, rows_per_panel);
  constexpr auto most_units = std::is_same_v<scalar_t, gemm_t>
      ? kUnitsOfABlock
      : kConvertedUnitsOfABlock;
  const auto units_per_block = size_of_a_block(sizes.state_size, most_units);
  const auto blocks = at::divup(sizes.state_size, units_per_block);
  // Few enough that there are about as many tasks as threads.
  const auto panels_per_task = std::clamp<int64_t>(
      at::divup(panels, at::divup(threads, blocks)), 1, kPanelsOfATask);
  const auto tasks_per_block =
      std::max<int64_t>(1, at::divup(panels, panels_per_task));
  // To read a byte of the weights takes as long as to multiply a row by it.
  const int64_t rows = sizes.batch + sizeof(scalar_t);
  return {
      .packed_rows = packed_rows,
      .dot_rows = dot_rows,
      .rows_per_panel = rows_per_panel,
      .panels = panels,
      .units_per_block = units_per_block,
      .blocks = blocks,
      .ld_products = round_up(units_per_block, 16),
      .panels_per_task = panels_per_task,
      .tasks_per_block = tasks_per_block,
      .rows_per_task =
          std::min(panels, panels_per_task) * rows_per_panel + dot_rows,
      .nanoseconds_per_task = 2 * kGates * units_per_block * sizes.features() *
          rows / kFlopPerNanosecond / tasks_per_block};
}

// products = [old_h, input] @ weights.T. Panels of rows have weights as the
// left operand, and give the transpose. The gates of a block of hidden units
// are computed while its products are in the cache.
template <typename scalar_t, typename gemm_t>
class Forward {
  using opmath_t = at::opmath_type<scalar_t>;
  static constexpr bool kConverts = !std::is_same_v<scalar_t, gemm_t>;

  const ForwardPointers<scalar_t>& p_;
  const ForwardPlan plan_;
  const int64_t features_;
  Panels<gemm_t> packed_rows_; // [features, packed_rows]
  Scratch<gemm_t> dot_rows_;   // [dot_rows, features]

  // The memory of a thread for its tasks.
  struct Workspace {
    Scratch<gemm_t> weights; // [units, features], of one gate, if converted
    Scratch<opmath_t> transposed; // [units, rows], of one gate and panel
    Scratch<opmath_t> products;   // [rows_per_task, kGates, ld_products]
  };

 public:
  explicit Forward(const ForwardPointers<scalar_t>& pointers)
      : p_(pointers),
        plan_(plan_of<scalar_t, gemm_t>(p_.sizes, at::get_num_threads())),
        features_(p_.sizes.features()),
        packed_rows_(features_, plan_.packed_rows, plan_.rows_per_panel),
        dot_rows_(plan_.dot_rows * features_) {}

  void run() {
    RECORD_USER_SCOPE(name_of_plan<gemm_t>(plan_));
    pack(p_.old_h, 0, p_.sizes.state_size);
    pack(p_.input, p_.sizes.state_size, p_.sizes.input_features);
    at::parallel_for(
        0,
        plan_.blocks * plan_.tasks_per_block,
        grain_size(plan_.nanoseconds_per_task),
        [&](int64_t begin, int64_t end) {
          const ProductGuard<gemm_t> guard;
          const auto units = plan_.units_per_block;
          Workspace workspace{
              Scratch<gemm_t>(kConverts ? units * features_ : 0),
              Scratch<opmath_t>(units * plan_.rows_per_panel),
              Scratch<opmath_t>(
                  plan_.rows_per_task * kGates * plan_.ld_products)};
          for (auto task = begin; task < end; ++task) {
            run_task(task, workspace);
          }
        });
  }

 private:
  // Copies old_h or input, [batch, size], whose features begin at
  // first_feature.
  void pack(const scalar_t* from, int64_t first_feature, int64_t size) {
    const Matrix<const scalar_t> rows{from, size};
    at::parallel_for(
        0,
        plan_.panels,
        grain_size(size * plan_.rows_per_panel / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (auto panel = begin; panel < end; ++panel) {
            packed_rows_.template pack_transposed<scalar_t>(
                panel,
                0,
                first_feature,
                rows.part(panel * plan_.rows_per_panel, 0),
                packed_rows_.columns(panel),
                size);
          }
        });
    run_with_best_isa(
        ConvertRows<scalar_t, gemm_t>{
            rows.part(plan_.packed_rows, 0),
            size,
            {dot_rows_.data() + first_feature, features_}},
        0,
        plan_.dot_rows);
  }

  void run_task(int64_t task, Workspace& workspace) const {
    const auto first_unit =
        task / plan_.tasks_per_block * plan_.units_per_block;
    const auto units =
        std::min(plan_.units_per_block, p_.sizes.state_size - first_unit);
    const auto first_panel =
        task % plan_.tasks_per_block * plan_.panels_per_task;
    const auto end_panel =
        std::min(first_panel + plan_.panels_per_task, plan_.panels);
    const bool has_dot_rows = end_panel == plan_.panels && plan_.dot_rows > 0;
    const auto first_row = first_panel * plan_.rows_per_panel;
    const auto end_row = end_panel == plan_.panels
        ? p_.sizes.batch
        : end_panel * plan_.rows_per_panel;
    const auto ld = plan_.ld_products;
    const Matrix<opmath_t> products{workspace.products.data(), kGates * ld};
    for (int64_t gate = 0; gate < kGates; ++gate) {
      const auto weights = weights_of(gate, first_unit, units, workspace);
      for (auto panel = first_panel; panel < end_panel; ++panel) {
        const auto row = panel * plan_.rows_per_panel - first_row;
        multiply_panel(
            panel,
            units,
            weights,
            {workspace.transposed.data(), plan_.rows_per_panel},
            products.part(row, gate * ld));
      }
      if (has_dot_rows) {
        const auto row = plan_.packed_rows - first_row;
        multiply_dot_rows(units, weights, products.part(row, gate * ld));
      }
    }
    run_with_best_isa(
        PointwiseForward<scalar_t>{
            .pointers = p_.cell,
            .products = products.data,
            .ld = ld,
            .first_row = first_row,
            .first_unit = first_unit,
            .end_unit = first_unit + units},
        0,
        end_row - first_row);
  }

  // [units, features]
  Matrix<const gemm_t> weights_of(
      int64_t gate,
      int64_t first_unit,
      int64_t units,
      Workspace& workspace) const {
    const auto from = Matrix<const scalar_t>{p_.weights, features_}.part(
        gate * p_.sizes.state_size + first_unit, 0);
    if constexpr (kConverts) {
      const Matrix<gemm_t> to{workspace.weights.data(), features_};
      run_with_best_isa(
          ConvertRows<scalar_t, gemm_t>{from, features_, to}, 0, units);
      return to;
    } else {
      return from;
    }
  }

  void multiply_panel(
      int64_t panel,
      int64_t units,
      Matrix<const gemm_t> weights,
      Matrix<opmath_t> transposed,
      Matrix<opmath_t> products) const {
    const auto rows = packed_rows_.columns(panel);
    multiply<gemm_t>(
        {.M = units,
         .N = round_up(rows, column_multiple<gemm_t>()),
         .K = features_,
         .A = weights,
         .B = packed_rows_.panel(panel),
         .C = transposed});
    run_with_best_isa(
        Transpose<opmath_t, opmath_t>{
            .from = transposed, .rows = units, .to = products},
        0,
        rows);
  }

  void multiply_dot_rows(
      int64_t units,
      Matrix<const gemm_t> weights,
      Matrix<opmath_t> products) const {
    if constexpr (kPair<gemm_t> == 1) {
      dot<gemm_t>(
          {.M = plan_.dot_rows,
           .N = units,
           .K = features_,
           .A = {dot_rows_.data(), features_},
           .B = weights,
           .C = products});
    }
  }
};

} // namespace

template void cell_forward(const ForwardPointers<double>&);
template void cell_forward(const ForwardPointers<float>&);
template void cell_forward(const ForwardPointers<c10::Half>&);
template void cell_forward(const ForwardPointers<c10::BFloat16>&);

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("forward", as_kernel<without_gates<forward_kernel_impl<false>>>());
  m.impl("_forward_with_gates", as_kernel<forward_kernel_impl<true>>());
}

} // namespace lltm
