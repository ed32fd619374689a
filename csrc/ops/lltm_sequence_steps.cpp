#include "ops/lltm_sequence_steps.h"

#include "ops/checks.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <c10/util/safe_numerics.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

namespace lltm {

namespace {

std::vector<int64_t> read_values(
    const at::Tensor& batch_sizes,
    std::string_view /*caller*/,
    std::string_view /*purpose*/) {
  const auto contiguous = batch_sizes.expect_contiguous();
  const auto* data = contiguous->const_data_ptr<int64_t>();
  return {data, data + contiguous->numel()};
}

std::vector<int64_t> refuse_to_read_values(
    const at::Tensor& /*batch_sizes*/,
    std::string_view caller,
    std::string_view purpose) {
  TORCH_CHECK(
      false,
      expected(
          std::string(caller).c_str(),
          c10::str("the values of batch_sizes, for ", purpose),
          "a tensor without values, or under torch.jit.trace, which would keep "
          "them"));
}

std::vector<int64_t> values_of(const char* op, const at::Tensor& batch_sizes) {
  if (batch_sizes.sym_numel() == 0) {
    return {};
  }
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("lltm::_values_of_batch_sizes", "")
          .typed<decltype(read_values)>();
  return handle.call(
      batch_sizes,
      op,
      "derivatives and transforms that are made of a loop over the steps");
}

// Lists the steps in the order of time, with carried not yet set.
std::vector<SequenceStep> packed_steps(
    const char* op,
    const at::Tensor& input,
    const at::Tensor& h0,
    const at::Tensor& batch_sizes) {
  const auto sizes = values_of(op, batch_sizes);
  const auto input_rows = input.sym_size(0).guard_int(__FILE__, __LINE__);
  std::vector<SequenceStep> steps;
  int64_t rows = 0;
  auto before = std::numeric_limits<int64_t>::max();
  for (size_t t = 0; t < sizes.size(); ++t) {
    const auto size = sizes[t];
    TORCH_CHECK(
        size >= 0 && size <= before,
        expected(
            op,
            "batch_sizes never to be negative, and never to increase",
            c10::str(size, " at step ", t)));
    // No more of them than input has rows, whatever the sizes say.
    if (size > 0 && rows < input_rows) {
      steps.push_back({.first_row = rows, .rows = size, .carried = 0});
    }
    TORCH_CHECK(
        !c10::add_overflows(rows, size, &rows),
        expected(op, "sum(batch_sizes) to be at most 2**63 - 1", "more"));
    before = size;
  }
  TORCH_CHECK(
      rows == input_rows,
      expected(
          op,
          c10::str("input to have sum(batch_sizes) = ", rows, " rows"),
          input_rows));
  // Whoever gives a packed sequence to a layer has named no h0 or batch_sizes.
  const auto batch = steps.empty() ? 0 : steps.front().rows;
  TORCH_CHECK(
      sizes.empty() || batch == h0.size(0),
      expected(
          op,
          c10::str(
              "an initial state for each of the ", batch, " packed sequences"),
          h0.size(0)));
  return steps;
}

std::vector<SequenceStep> padded_steps(const at::Tensor& input) {
  const auto batch = input.size(1);
  std::vector<SequenceStep> steps(batch == 0 ? 0 : input.size(0));
  for (size_t t = 0; t < steps.size(); ++t) {
    steps[t] = {static_cast<int64_t>(t) * batch, batch, 0};
  }
  return steps;
}

} // namespace

at::Tensor as_rows(const at::Tensor& t) {
  return t.dim() == 2
      ? t
      : t.reshape_symint({t.sym_size(0) * t.sym_size(1), t.sym_size(2)});
}

at::Tensor empty_rows(const at::Tensor& input, const c10::SymInt& columns) {
  auto sizes = input.sym_sizes().vec();
  sizes.back() = columns;
  return input.new_empty_symint(sizes);
}

at::Tensor of_step(const at::Tensor& rows, const SequenceStep& step) {
  return rows.narrow(0, step.first_row, step.rows);
}

at::Tensor last_states(
    const std::vector<SequenceStep>& steps,
    const at::Tensor& states,
    const at::Tensor& initial) {
  std::vector<at::Tensor> found;
  int64_t rows = 0;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (step->rows > rows) {
      found.push_back(
          states.narrow(0, step->first_row + rows, step->rows - rows));
      rows = step->rows;
    }
  }
  found.push_back(initial.narrow(0, rows, initial.size(0) - rows));
  return at::cat(found, 0);
}

std::vector<SequenceStep> sequence_steps(
    const char* op,
    const at::Tensor& input,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool reverse) {
  // Tensors can be expanded to any size; a list of steps cannot.
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  const auto size = batch_sizes ? batch_sizes->size(0) : input.size(0);
  TORCH_CHECK(
      size <= most, expected(op, c10::str("at most ", most, " steps"), size));
  auto steps = batch_sizes ? packed_steps(op, input, h0, *batch_sizes)
                           : padded_steps(input);
  if (steps.empty()) {
    steps.push_back({.first_row = 0, .rows = 0, .carried = 0});
  }
  if (reverse) {
    std::reverse(steps.begin(), steps.end());
  }
  for (size_t i = 1; i < steps.size(); ++i) {
    steps[i].carried = std::min(steps[i].rows, steps[i - 1].rows);
  }
  return steps;
}

std::vector<SequenceChunk> sequence_chunks(
    const std::vector<SequenceStep>& steps,
    int64_t max_rows) {
  std::vector<SequenceChunk> chunks;
  for (int64_t i = 0; i < static_cast<int64_t>(steps.size()); ++i) {
    const auto& step = steps[i];
    if (chunks.empty() || chunks.back().rows + step.rows > max_rows) {
      chunks.push_back(
          {.begin = i, .end = i, .first_row = step.first_row, .rows = 0});
    }
    auto& chunk = chunks.back();
    chunk.end = i + 1;
    chunk.first_row = std::min(chunk.first_row, step.first_row);
    chunk.rows += step.rows;
  }
  return chunks;
}

int64_t most_rows(const std::vector<SequenceChunk>& chunks) {
  return std::ranges::max(chunks, {}, &SequenceChunk::rows).rows;
}

TORCH_LIBRARY_IMPL(lltm, CompositeExplicitAutograd, m) {
  m.impl("_values_of_batch_sizes", TORCH_FN(read_values));
}

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("_values_of_batch_sizes", TORCH_FN(refuse_to_read_values));
}

TORCH_LIBRARY_IMPL(lltm, Tracer, m) {
  m.impl("_values_of_batch_sizes", TORCH_FN(refuse_to_read_values));
}

} // namespace lltm
