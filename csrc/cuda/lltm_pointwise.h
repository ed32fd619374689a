#pragma once

#include "ops/gate_math.h"

#include <ATen/OpMathType.h>

#include <cstdint>
#include <type_traits>

// The pointwise part of a step, for unit i of a row. Compiles for the host too,
// where tests run it.
namespace lltm {

// gates holds the pre-activations, and takes the activated gates if
// write_gates.
template <typename scalar_t, bool write_gates>
struct ForwardUnit {
  int64_t state_size;
  scalar_t* gates;
  const scalar_t* old_cell;
  scalar_t* new_h;
  scalar_t* new_cell;

  LLTM_INLINE void operator()(int64_t row, int64_t i) const {
    using opmath_t = at::opmath_type<scalar_t>;
    const int64_t unit = row * state_size + i;
    scalar_t* const input_gate = gates + row * 3 * state_size + i;
    scalar_t* const output_gate = input_gate + state_size;
    scalar_t* const candidate = output_gate + state_size;
    const auto out = cell_forward<opmath_t>(
        *input_gate, *output_gate, *candidate, old_cell[unit]);
    new_h[unit] = out.new_h;
    new_cell[unit] = out.new_cell;
    if constexpr (write_gates) {
      *input_gate = out.input_gate;
      *output_gate = out.output_gate;
      *candidate = out.candidate;
    }
  }
};

// in_sequence: grad_h and grad_cell are joined by what the step after this one
// has left in d_h and d_cell, which is in opmath_t, for it adds up over steps.
template <typename scalar_t, bool in_sequence>
struct BackwardUnit {
  using opmath_t = at::opmath_type<scalar_t>;
  using d_cell_t = std::conditional_t<in_sequence, opmath_t, scalar_t>;

  int64_t state_size;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  const scalar_t* d_h;
  scalar_t* d_gates; // null: nobody needs them
  d_cell_t* d_cell;

  LLTM_INLINE void operator()(int64_t row, int64_t i) const {
    const int64_t unit = row * state_size + i;
    const int64_t gate = row * 3 * state_size + i;
    opmath_t d_new_h = grad_h[unit];
    opmath_t d_new_cell = grad_cell[unit];
    if constexpr (in_sequence) {
      d_new_h += opmath_t(d_h[unit]);
      d_new_cell += d_cell[unit];
    }
    const auto out = cell_backward<opmath_t>(
        d_new_h,
        d_new_cell,
        new_cell[unit],
        gates[gate],
        gates[gate + state_size],
        gates[gate + 2 * state_size]);
    d_cell[unit] = out.d_old_cell;
    if (d_gates != nullptr) {
      d_gates[gate] = out.d_input_gate;
      d_gates[gate + state_size] = out.d_output_gate;
      d_gates[gate + 2 * state_size] = out.d_candidate;
    }
  }
};

} // namespace lltm
