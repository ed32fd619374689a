#include "cpu/lltm_sequence_backward_steps.h"

#include "cpu/lltm_empty_gradients.h"
#include "cpu/lltm_gradients.h"
#include "cpu/lltm_sequence_states.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/profiled_path.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/work.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <type_traits>
#include <vector>

// lltm::sequence_backward on the CPU: the gradients of the gates, step by step,
// then the products of lltm_gradients.h.
namespace lltm {

namespace {

// Rows of a chunk. There are many, because each chunk reads and writes
// d_weights once.
constexpr int64_t kRowsOfABackwardChunk = 1024;

// Chunks of steps from the last to the first: the recurrence, then the products
// of all its rows at once.
template <typename scalar_t, typename gemm_t>
class SequenceBackward {
 public:
  explicit SequenceBackward(const SequenceBackwardPointers<scalar_t>& pointers)
      : a_(pointers),
        old_h_{
            .steps = a_.steps,
            .state_size = a_.sizes.state_size,
            .h = a_.output,
            .h0 = a_.h0,
            .resets = a_.resets},
        chunks_(sequence_chunks(a_.steps, kRowsOfABackwardChunk)) {}

  void run() {
    SequenceBackwardRecurrence<scalar_t, gemm_t> recurrence(a_);
    const auto gate_units = 3 * a_.sizes.state_size;
    const Sum d_weights(
        a_.gradients.d_weights, gate_units * a_.sizes.features());
    const Sum d_bias(a_.gradients.d_bias, gate_units);
    const auto most = most_rows(chunks_);
    const auto ld_rows = leading_dimension<gemm_t>(gate_units);
    const Scratch<gemm_t> rows(most * ld_rows);
    int64_t ld_columns = 0;
    for (const auto& chunk : chunks_) {
      ld_columns = std::max(ld_columns, leading_dimension<gemm_t>(chunk.rows));
    }
    const Scratch<gemm_t> columns(wants_columns_ ? gate_units * ld_columns : 0);
    const Scratch<scalar_t> old_h(
        a_.gradients.d_weights == nullptr
            ? 0
            : rows_to_gather() * a_.sizes.state_size);
    for (auto chunk = chunks_.rbegin(); chunk != chunks_.rend(); ++chunk) {
      const GateGradients<gemm_t> d_gates{
          .batch = chunk->rows,
          .gate_units = gate_units,
          .rows = {rows.data(), ld_rows},
          .columns = {columns.data(), leading_dimension<gemm_t>(chunk->rows)}};
      d_gates.zero_padding();
      recurrence.run(*chunk, d_gates.rows);
      multiply(
          *chunk,
          d_gates,
          old_h.data(),
          d_weights.data,
          d_bias.data,
          chunk != chunks_.rbegin());
    }
    write_if_wanted(
        d_weights.data,
        a_.gradients.d_weights,
        gate_units * a_.sizes.features());
    write_if_wanted(d_bias.data, a_.gradients.d_bias, gate_units);
    write_if_wanted(
        recurrence.d_h(),
        a_.gradients.d_old_h,
        a_.sizes.batch * a_.sizes.state_size);
    write_if_wanted(
        recurrence.d_cell(),
        a_.gradients.d_old_cell,
        a_.sizes.batch * a_.sizes.state_size);
  }

 private:
  using opmath_t = at::opmath_type<scalar_t>;

  // A gradient that adds up over chunks, in opmath_t: in the result, or in
  // memory of its own. Null: not wanted.
  struct Sum {
    Sum(scalar_t* wanted, int64_t size)
        : scratch(kInPlace || wanted == nullptr ? 0 : size) {
      if constexpr (kInPlace) {
        data = wanted;
      } else {
        data = scratch.data();
      }
    }

    static constexpr bool kInPlace = std::is_same_v<scalar_t, opmath_t>;
    const Scratch<opmath_t> scratch;
    opmath_t* data;
  };

  static void
  write_if_wanted(const opmath_t* from, scalar_t* to, int64_t size) {
    if (to != nullptr && static_cast<const void*>(from) != to) {
      convert(from, to, size);
    }
  }

  void multiply(
      const SequenceChunk& chunk,
      const GateGradients<gemm_t>& d_gates,
      scalar_t* old_h_scratch,
      opmath_t* d_weights,
      opmath_t* d_bias,
      bool accumulate) const {
    // The rows of a chunk take the place of a batch.
    const CellSizes sizes{
        chunk.rows, a_.sizes.input_features, a_.sizes.state_size};
    if (wants_columns_) {
      d_gates.transpose();
    }
    if (d_bias != nullptr) {
      bias_gradient(d_gates, d_bias, accumulate);
    }
    const auto* input = a_.input + chunk.first_row * a_.sizes.input_features;
    if (d_weights != nullptr) {
      const auto* h = old_h(chunk, old_h_scratch);
      weights_gradient(sizes, d_gates, h, input, d_weights, accumulate);
    }
    if (a_.gradients.d_input != nullptr) {
      rows_gradient(
          sizes,
          d_gates,
          a_.weights + a_.sizes.state_size,
          a_.sizes.input_features,
          a_.gradients.d_input + chunk.first_row * a_.sizes.input_features);
    }
  }

  // The states that the rows of a chunk begin with lie together.
  bool lie_together(const SequenceChunk& chunk) const {
    return !a_.packed && a_.resets.data == nullptr && chunk.begin > 0;
  }

  int64_t rows_to_gather() const {
    int64_t rows = 0;
    for (const auto& chunk : chunks_) {
      rows = std::max(rows, lie_together(chunk) ? 0 : chunk.rows);
    }
    return rows;
  }

  // The h that each row of a chunk begins with, in the order of the input.
  const scalar_t* old_h(const SequenceChunk& chunk, scalar_t* scratch) const {
    if (lie_together(chunk)) {
      // Steps from begin - 1 to end - 2 left them. In reverse the last of these
      // comes first in memory.
      const auto first = std::min(
          a_.steps[chunk.begin - 1].first_row,
          a_.steps[chunk.end - 2].first_row);
      return a_.output + first * a_.sizes.state_size;
    }
    at::parallel_for(
        chunk.begin,
        chunk.end,
        grain_size(a_.sizes.batch * a_.sizes.state_size / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          for (int64_t step = begin; step < end; ++step) {
            const auto& [first_row, rows, carried] = a_.steps[step];
            auto* to =
                scratch + (first_row - chunk.first_row) * a_.sizes.state_size;
            const auto* from =
                old_h_.template rows<scalar_t>(step, 0, rows, to);
            if (from != to) {
              std::copy_n(from, rows * a_.sizes.state_size, to);
            }
          }
        });
    return scratch;
  }

  const SequenceBackwardPointers<scalar_t>& a_;
  const OldH<scalar_t> old_h_;
  const std::vector<SequenceChunk> chunks_;
  const bool wants_columns_ =
      a_.gradients.d_weights != nullptr || a_.gradients.d_bias != nullptr;
};

template <typename scalar_t>
void sequence_backward_steps(
    const SequenceBackwardPointers<scalar_t>& pointers) {
  if constexpr (kPair<scalar_t> == 2) {
    if (has_bfloat16_gemm()) { // odd sizes are padded with zeros
      const ProfiledPath path("lltm::sequence_backward_gemm_bfloat16");
      return SequenceBackward<scalar_t, scalar_t>(pointers).run();
    }
  }
  const ProfiledPath path("lltm::sequence_backward_gemm");
  SequenceBackward<scalar_t, at::opmath_type<scalar_t>>(pointers).run();
}

BackwardResult sequence_backward_kernel(const SequenceBackwardArguments& a) {
  check_arguments(a);
  const auto steps = sequence_steps(a);
  const auto result =
      empty_gradients(a.output, a.input, a.weights, a.h0, a.output_mask);
  if (a.output.numel() == 0) {
    return result;
  }
  const auto grad_output = a.grad_output.expect_contiguous();
  const auto grad_cells = a.grad_cells.expect_contiguous();
  const auto output = a.output.expect_contiguous();
  const auto cells = a.cells.expect_contiguous();
  const auto gates = a.gates.expect_contiguous();
  const auto input = a.input.expect_contiguous();
  const auto weights = a.weights.expect_contiguous();
  const auto h0 = a.h0.expect_contiguous();
  const auto resets = a.resets ? a.resets->contiguous() : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf,
      at::kBFloat16,
      a.input.scalar_type(),
      "lltm_sequence_backward_cpu",
      [&] {
        sequence_backward_steps<scalar_t>({
            .sizes = {a.h0.size(0), a.input.size(-1), a.h0.size(1)},
            .gradients = pointers_to<scalar_t>(result),
            .steps = steps,
            .packed = a.batch_sizes.has_value(),
            .grad_output = grad_output->const_data_ptr<scalar_t>(),
            .grad_cells = grad_cells->const_data_ptr<scalar_t>(),
            .output = output->const_data_ptr<scalar_t>(),
            .cells = cells->const_data_ptr<scalar_t>(),
            .gates = gates->const_data_ptr<scalar_t>(),
            .input = input->const_data_ptr<scalar_t>(),
            .weights = weights->const_data_ptr<scalar_t>(),
            .h0 = h0->const_data_ptr<scalar_t>(),
            .resets = bytes_of(resets),
        });
      });
  return result;
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, CPU, m) {
  m.impl("sequence_backward", as_kernel<sequence_backward_kernel>());
}

} // namespace lltm
