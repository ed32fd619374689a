#include "ops/sequence_steps.h"

#include <algorithm>

namespace lltm {

namespace {

std::vector<int64_t> values_of(const char* op, const at::Tensor& batch_sizes) {
  std::vector<int64_t> values(batch_sizes.size(0));
  if (batch_sizes.has_storage()) {
    const auto contiguous = batch_sizes.expect_contiguous();
    const auto* data = contiguous->const_data_ptr<int64_t>();
    // A loop over steps can be traced for one number of steps of known sizes.
    TORCH_CHECK(
        values.empty() || data != nullptr,
        op,
        ": expected the values of batch_sizes, for derivatives that are made ",
        "of a loop over the steps, but got a tensor without values, as "
        "tracers ",
        "use");
    std::copy_n(data, values.size(), values.begin());
  } else {
    // torch.func wraps every argument of an operator, those too that have no
    // derivatives.
    for (size_t t = 0; t < values.size(); ++t) {
      values[t] = batch_sizes[t].item<int64_t>();
    }
  }
  return values;
}

// In the order of time, without what they carry.
std::vector<SequenceStep> packed_steps(
    const char* op,
    const at::Tensor& input,
    const at::Tensor& h0,
    const at::Tensor& batch_sizes) {
  const auto sizes = values_of(op, batch_sizes);
  std::vector<SequenceStep> steps(sizes.size());
  int64_t rows = 0;
  for (size_t t = 0; t < steps.size(); ++t) {
    TORCH_CHECK(
        sizes[t] >= 0 && sizes[t] <= (t == 0 ? h0.size(0) : sizes[t - 1]) &&
            (t > 0 || sizes[t] == h0.size(0)),
        op,
        ": expected batch_sizes to begin with the batch of h0, ",
        h0.size(0),
        ", and never to increase, but got ",
        sizes[t],
        " at step ",
        t);
    steps[t] = {rows, sizes[t], 0};
    rows += sizes[t];
  }
  TORCH_CHECK(
      rows == input.size(0),
      op,
      ": expected input to have sum(batch_sizes) = ",
      rows,
      " rows, but got ",
      input.size(0));
  return steps;
}

} // namespace

at::Tensor empty_rows(const at::Tensor& input, const c10::SymInt& columns) {
  auto sizes = input.sym_sizes().vec();
  sizes.back() = columns;
  return input.new_empty_symint(sizes);
}

at::Tensor of_step(const at::Tensor& rows, const SequenceStep& step) {
  return rows.narrow(0, step.first_row, step.rows);
}

std::vector<SequenceStep> sequence_steps(
    const char* op,
    const at::Tensor& input,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool reverse) {
  std::vector<SequenceStep> steps;
  if (batch_sizes) {
    steps = packed_steps(op, input, h0, *batch_sizes);
  } else {
    const auto batch = input.size(1);
    steps.reserve(input.size(0));
    for (int64_t t = 0; t < input.size(0); ++t) {
      steps.push_back({t * batch, batch, 0});
    }
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
    // None without rows: backward sets gradients in the last chunk, and adds to
    // them in the others.
    if (chunks.empty() ||
        (chunks.back().rows > 0 && step.rows > 0 &&
         chunks.back().rows + step.rows > max_rows)) {
      chunks.push_back({i, i, step.first_row, 0});
    }
    auto& chunk = chunks.back();
    chunk.end = i + 1;
    chunk.first_row = std::min(chunk.first_row, step.first_row);
    chunk.rows += step.rows;
  }
  return chunks;
}

int64_t most_rows(const std::vector<SequenceChunk>& chunks) {
  int64_t most = 0;
  for (const auto& chunk : chunks) {
    most = std::max(most, chunk.rows);
  }
  return most;
}

} // namespace lltm
