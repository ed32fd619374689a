#pragma once

#include "cuda/launch_pointwise.h"
#include "cuda/lltm_pointwise.h"
#include "cuda/recurrence/arguments.h"
#include "ops/checks.h"
#include "ops/lltm_sequence_steps.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>

// What both directions of a sequence share. One GEMM makes the products with
// input of many steps. Then either the recurrence does the rest, or each step
// makes its products with h by one GEMM, and its gates in one kernel.
namespace lltm {

// What they need of CUDA.
template <typename T>
concept SequenceDevice = PointwiseDevice<T> && requires(at::Tensor tensor) {
  // What the products of a chunk may take, where nobody wants the gates.
  int64_t(T::kBytesOfGates);
  T::mm_out(tensor, tensor, tensor); // out = a @ b, in the dtype of out
  bool(T::recurrence_is_on());       // whether to try it
  T::fill_sentinel(tensor);          // sets all its bytes to 0xff
  // They do what launch_with_fewest_tiles() of recurrence/launch.h does.
  T::launch_recurrence(recurrence::Forward<at::Half>(), T::stream());
  T::launch_recurrence(recurrence::Backward<at::Half>(), T::stream());
};

inline at::Tensor flat_or_none(const OptionalTensor& tensor) {
  return tensor ? tensor->contiguous().flatten() : at::Tensor();
}

// Read as bytes, because any byte but 0 is a reset.
inline const uint8_t* bytes_or_null(const at::Tensor& resets) {
  return resets.defined()
      ? reinterpret_cast<const uint8_t*>(resets.const_data_ptr<bool>())
      : nullptr;
}

// step: or null.
inline RowResets resets_of(const at::Tensor& resets, const SequenceStep* step) {
  return resets.defined() && step != nullptr
      ? RowResets{bytes_or_null(resets) + step->first_row, step->rows}
      : RowResets{};
}

// A pointer to the rows of a step.
template <typename scalar_t>
scalar_t* mutable_rows(const at::Tensor& rows, const SequenceStep& step) {
  return rows.mutable_data_ptr<scalar_t>() + step.first_row * rows.size(1);
}

// Returns the weights for h as so many products shall read them. cuBLAS is slow
// where rows do not begin at multiples of 16 bytes, as with an odd number of
// input features. Then a copy is worth its time, if its own rows do.
inline at::Tensor weights_for_products(
    const at::Tensor& weights_for_h,
    int64_t products) {
  const auto is_aligned = [&](int64_t elements) {
    return elements * weights_for_h.element_size() % 16 == 0;
  };
  const bool copies = products > 1 && !is_aligned(weights_for_h.stride(0)) &&
      is_aligned(weights_for_h.size(1));
  return copies ? weights_for_h.contiguous() : weights_for_h;
}

// In fewer steps, loading the weights into registers costs as much as the
// recurrence saves.
constexpr size_t kLeastStepsOfRecurrence = 3;

// Returns nothing if the recurrence is off, or does not take the sequence.
template <SequenceDevice Device, typename Arguments>
std::optional<recurrence::Sequence> recurrence_sequence(
    const Arguments& a,
    const std::vector<SequenceStep>& steps) {
  const auto batch = a.h0.size(0);
  const auto state_size = a.h0.size(1);
  const bool packed = a.batch_sizes.has_value();
  const bool fits = Device::recurrence_is_on() &&
      steps.size() >= kLeastStepsOfRecurrence &&
      (a.h0.scalar_type() == at::kHalf ||
       a.h0.scalar_type() == at::kBFloat16) &&
      state_size % recurrence::kColumns == 0 && state_size > 0 &&
      state_size <= recurrence::kMostUnits &&
      batch <= (packed ? recurrence::kMostPackedBatch : INT32_MAX);
  if (!fits) {
    return std::nullopt;
  }
  recurrence::Sequence sequence{};
  sequence.steps = static_cast<int32_t>(steps.size());
  sequence.batch = static_cast<int32_t>(batch);
  sequence.reverse = a.reverse;
  sequence.packed = packed;
  int64_t filled = 0; // the last steps have the fewest rows
  for (auto t = sequence.steps; packed && t > 0; --t) {
    const auto rows = steps[a.reverse ? sequence.steps - t : t - 1].rows;
    for (; filled < rows; ++filled) {
      sequence.lengths[filled] = t;
    }
  }
  return sequence;
}

inline recurrence::Cursor
cursor_of(const std::vector<SequenceStep>& steps, int64_t i, bool reverse) {
  const auto last = static_cast<int64_t>(steps.size()) - 1;
  return {
      static_cast<int32_t>(reverse ? last - i : i),
      static_cast<int32_t>(steps[i].rows),
      steps[i].first_row};
}

template <typename scalar_t, typename OfOperator>
void set_common(
    recurrence::Arguments<scalar_t>& args,
    const OfOperator& a,
    const recurrence::Sequence& sequence,
    const at::Tensor& weights_for_h,
    const at::Tensor& resets) {
  args.math = CellMath<float>(a);
  args.sequence = sequence;
  args.state_size = static_cast<int32_t>(weights_for_h.size(1));
  args.weights = weights_for_h.const_data_ptr<scalar_t>();
  args.weights_strides[0] = weights_for_h.stride(0);
  args.weights_strides[1] = weights_for_h.stride(1);
  args.resets = bytes_or_null(resets);
}

// How many launches did not run, and how many did, in this process.
inline std::array<std::atomic<int64_t>, 2> launches{};

// Whether it ran: why_not is empty. Counts it, and warns of the first that did
// not.
inline bool count_launch(
    const std::string& why_not,
    const char* operator_name) {
  const bool ran = why_not.empty();
  if (++launches[ran] == 1 && !ran) {
    TORCH_WARN(
        operator_name,
        ": a sequence runs step by step, which is slower than in one kernel: ",
        why_not);
  }
  return ran;
}

} // namespace lltm
