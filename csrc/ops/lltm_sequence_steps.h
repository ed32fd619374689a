#pragma once

#include "ops/lltm_sequence.h"

#include <vector>

namespace lltm {

// A padded tensor as a packed one, [time * batch, columns]. Gradcheck's vmap
// has no rule for flatten().
at::Tensor as_rows(const at::Tensor& tensor);

// An uninitialised tensor with a row of so many columns for each row of input.
at::Tensor empty_rows(const at::Tensor& input, const c10::SymInt& columns);

// A step's rows in tensors [rows, ...], which hold one step after the other.
struct SequenceStep {
  int64_t first_row;
  int64_t rows;
  // So many of the rows go on from the state of the step before, unless a reset
  // cuts them. The rest begin with the initial state.
  int64_t carried;
};

// The rows of a step.
at::Tensor of_step(const at::Tensor& rows, const SequenceStep& step);

// The state after the step of each sequence that runs last, [batch,
// state_size], out of the states after all steps, [rows, state_size]. Without
// steps it is the initial one.
at::Tensor last_states(
    const std::vector<SequenceStep>& steps,
    const at::Tensor& states,
    const at::Tensor& initial);

// The steps in the order in which they run, without those that have no rows. If
// none has rows, there is one step all the same, because autograd and vmap need
// results that are computed from all arguments. Checks the values of
// batch_sizes, and that input and h0 have the rows that they say.
std::vector<SequenceStep> sequence_steps(
    const char* op,
    const at::Tensor& input,
    const at::Tensor& h0,
    const OptionalTensor& batch_sizes,
    bool reverse);

template <typename Arguments>
std::vector<SequenceStep> sequence_steps(const Arguments& a) {
  return sequence_steps(a.kOperator, a.input, a.h0, a.batch_sizes, a.reverse);
}

// Steps that are computed together, and their rows, which lie together.
struct SequenceChunk {
  int64_t begin;
  int64_t end;
  int64_t first_row;
  int64_t rows;
};

// Chunks of at most so many rows, but of one step at least.
std::vector<SequenceChunk> sequence_chunks(
    const std::vector<SequenceStep>& steps,
    int64_t max_rows);

// The number of rows of the largest chunk.
int64_t most_rows(const std::vector<SequenceChunk>& chunks);

} // namespace lltm
