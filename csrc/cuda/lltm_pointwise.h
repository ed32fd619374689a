#pragma once

#include "ops/gate_math.h"

#include <ATen/OpMathType.h>

#include <cstdint>

// The pointwise part of a step, for unit i of a row of contiguous tensors.
// Compiles for the host too, where tests run it.
namespace lltm {

// gates: of the unit, state_size apart. They hold the pre-activations, to which
// added is added if it is not null. If write_gates, the activated gates replace
// them.
template <bool write_gates, typename scalar_t, typename opmath_t>
LLTM_INLINE UnitResults<opmath_t> unit_forward(
    const CellMath<opmath_t>& math,
    scalar_t* gates,
    const opmath_t* added,
    int64_t state_size,
    opmath_t old_cell) {
  const auto sum = [&](int64_t gate) {
    const opmath_t product = gates[gate * state_size];
    return added == nullptr ? product : product + added[gate * state_size];
  };
  const auto out = math.forward(sum(0), sum(1), sum(2), old_cell);
  if constexpr (write_gates) {
    gates[0] = out.input_gate;
    gates[state_size] = out.output_gate;
    gates[2 * state_size] = out.candidate;
  }
  return out;
}

// Returns d_old_cell. d_preactivations: null if they are not needed.
template <typename scalar_t, typename opmath_t>
LLTM_INLINE opmath_t unit_backward(
    const CellMath<opmath_t>& math,
    opmath_t grad_h,
    opmath_t grad_cell,
    opmath_t new_cell,
    const scalar_t* gates,
    scalar_t* d_preactivations,
    int64_t state_size) {
  const auto out = math.backward(
      grad_h,
      grad_cell,
      lltm::tanh(new_cell),
      gates[0],
      gates[state_size],
      gates[2 * state_size]);
  if (d_preactivations != nullptr) {
    d_preactivations[0] = out.d_pre_i;
    d_preactivations[state_size] = out.d_pre_o;
    d_preactivations[2 * state_size] = out.d_pre_g;
  }
  return out.d_old_cell;
}

template <typename scalar_t, bool write_gates>
struct ForwardUnit {
  using opmath_t = at::opmath_type<scalar_t>;

  CellMath<opmath_t> math;
  int64_t state_size;
  scalar_t* gates;
  const scalar_t* old_cell;
  scalar_t* new_h;
  scalar_t* new_cell;

  LLTM_INLINE void operator()(int64_t row, int64_t i) const {
    const int64_t unit = row * state_size + i;
    const auto out = unit_forward<write_gates>(
        math,
        gates + row * 3 * state_size + i,
        static_cast<const opmath_t*>(nullptr),
        state_size,
        opmath_t(old_cell[unit]));
    new_h[unit] = out.new_h;
    new_cell[unit] = out.new_cell;
  }
};

template <typename scalar_t>
struct BackwardUnit {
  using opmath_t = at::opmath_type<scalar_t>;

  CellMath<opmath_t> math;
  int64_t state_size;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  scalar_t* d_preactivations; // or null
  scalar_t* d_cell;

  LLTM_INLINE void operator()(int64_t row, int64_t i) const {
    const int64_t unit = row * state_size + i;
    const int64_t gate = row * 3 * state_size + i;
    d_cell[unit] = unit_backward(
        math,
        opmath_t(grad_h[unit]),
        opmath_t(grad_cell[unit]),
        opmath_t(new_cell[unit]),
        gates + gate,
        d_preactivations == nullptr ? nullptr : d_preactivations + gate,
        state_size);
  }
};

// The resets of a step with so many rows. Null if there are none.
struct RowResets {
  const uint8_t* resets;
  int64_t rows;

  LLTM_INLINE bool operator[](int64_t row) const {
    return resets != nullptr && row < rows && resets[row] != 0;
  }
};

// A step of a sequence, which the first rows of the batch run. h and cell are
// of the whole batch. They hold the state that this step begins with, and take
// the state that the next step begins with.
template <typename scalar_t, bool write_gates>
struct SequenceForwardUnit {
  using opmath_t = at::opmath_type<scalar_t>;

  CellMath<opmath_t> math;
  int64_t state_size;
  int64_t rows;
  scalar_t* products;              // those with input, plus bias
  const opmath_t* products_with_h; // not rounded before they become gates
  scalar_t* output;
  scalar_t* cells;
  scalar_t* h;
  opmath_t* cell; // not rounded, for it adds up over steps
  RowResets next_resets;

  LLTM_INLINE void operator()(int64_t row, int64_t i) const {
    const int64_t unit = row * state_size + i;
    if (row < rows) {
      const int64_t gate = row * 3 * state_size + i;
      const auto out = unit_forward<write_gates>(
          math,
          products + gate,
          products_with_h + gate,
          state_size,
          cell[unit]);
      output[unit] = out.new_h;
      cells[unit] = out.new_cell;
      h[unit] = out.new_h;
      cell[unit] = out.new_cell;
    }
    if (next_resets[row]) {
      h[unit] = 0;
      cell[unit] = 0;
    }
  }
};

// The gradients of a step. d_h and d_cell are of the whole batch. They hold the
// gradients of the state that the next step begins with. d_cell takes the
// gradient of the cell state that this step begins with.
template <typename scalar_t>
struct SequenceBackwardUnit {
  using opmath_t = at::opmath_type<scalar_t>;

  CellMath<opmath_t> math;
  int64_t state_size;
  int64_t rows;
  const scalar_t* grad_output;
  const scalar_t* grad_cells; // or null: zeros
  const scalar_t* cells;
  const scalar_t* gates;
  scalar_t* d_preactivations;
  opmath_t* d_h; // for this step, a product with d_preactivations gives it
  opmath_t* d_cell;
  RowResets next_resets;

  LLTM_INLINE void operator()(int64_t row, int64_t i) const {
    const int64_t unit = row * state_size + i;
    if (next_resets[row]) {
      d_h[unit] = 0;
      d_cell[unit] = 0;
    }
    if (row < rows) {
      const int64_t gate = row * 3 * state_size + i;
      d_cell[unit] = unit_backward(
          math,
          opmath_t(grad_output[unit]) + d_h[unit],
          opmath_t(grad_cells == nullptr ? scalar_t(0) : grad_cells[unit]) +
              d_cell[unit],
          opmath_t(cells[unit]),
          gates + gate,
          d_preactivations + gate,
          state_size);
    }
  }
};

} // namespace lltm
