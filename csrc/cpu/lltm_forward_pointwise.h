#pragma once

#include "cpu/cell_sizes.h"
#include "cpu/convert.h"
#include "cpu/gemm.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>

#include <type_traits>

// What follows the products of the forward step.
namespace lltm {

// On raw pointers to contiguous memory.
template <typename scalar_t>
struct ForwardArguments : CellSizes {
  using opmath_t = at::opmath_type<scalar_t>;

  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* bias;
  const scalar_t* old_h;
  const scalar_t* old_cell;
  scalar_t* new_h;
  scalar_t* new_cell;
  scalar_t* gates; // null: not wanted
  // Half types in a sequence: the cell states without rounding, of which the
  // old one is read in place of old_cell. Else null.
  const opmath_t* unrounded_old_cell;
  opmath_t* unrounded_new_cell;
};

// What follows the products, for a block of units: activations is
// [rows, 3, ld], without bias.
template <typename scalar_t>
struct ForwardBlock {
  using opmath_t = at::opmath_type<scalar_t>;

  const ForwardArguments<scalar_t>& arguments;
  int64_t first_row;
  int64_t first_unit;
  int64_t units;

  C10_ALWAYS_INLINE void
  write_row(int64_t row, const opmath_t* activations, int64_t ld) const {
    if (arguments.gates == nullptr) {
      write_row<false>(row, activations, ld);
    } else {
      write_row<true>(row, activations, ld);
    }
  }

  template <bool write_gates>
  C10_ALWAYS_INLINE void
  write_row(int64_t row, const opmath_t* activations, int64_t ld) const {
    if constexpr (!std::is_same_v<scalar_t, opmath_t>) {
      if (arguments.unrounded_old_cell != nullptr) {
        return write_row<write_gates, true>(row, activations, ld);
      }
    }
    write_row<write_gates, false>(row, activations, ld);
  }

  // Whole vectors. Where units are no multiple, the last one overlaps the one
  // before, or stands alone, padded, unless that costs more than it gains.
  template <bool write_gates, bool unrounded>
  C10_ALWAYS_INLINE void
  write_row(int64_t row, const opmath_t* activations, int64_t ld) const {
    const auto& a = arguments;
    const auto at = (first_row + row) * a.state_size + first_unit;
    const Units all{
        activations,
        ld,
        a.bias + first_unit,
        a.old_cell + at,
        a.new_h + at,
        a.new_cell + at,
        write_gates
            ? a.gates + (first_row + row) * 3 * a.state_size + first_unit
            : nullptr,
        unrounded ? a.unrounded_old_cell + at : nullptr,
        unrounded ? a.unrounded_new_cell + at : nullptr,
        a.state_size};
    if (units < 5) {
      return compute<write_gates, unrounded>(all, 0, units);
    }
    if (units < kVector) {
      return padded<write_gates, unrounded>(all);
    }
    const auto whole = units / kVector * kVector;
    compute<write_gates, unrounded>(all, 0, whole);
    if (whole < units) {
      compute<write_gates, unrounded>(all, units - kVector, kVector);
    }
  }

  // Consecutive ones of a row, the three gates ld and state_size apart.
  struct Units {
    const opmath_t* activations;
    int64_t ld;
    const scalar_t* bias;
    const scalar_t* old_cell;
    scalar_t* new_h;
    scalar_t* new_cell;
    scalar_t* gates;
    const opmath_t* unrounded_old_cell;
    opmath_t* unrounded_new_cell;
    int64_t state_size;
  };

  template <bool write_gates, bool unrounded>
  C10_ALWAYS_INLINE void padded(const Units& from) const {
    opmath_t activations[3 * kVector] = {};
    scalar_t bias[3 * kVector] = {};
    scalar_t old_cell[kVector] = {};
    opmath_t unrounded_old_cell[kVector] = {};
    scalar_t new_h[kVector], new_cell[kVector], gates[3 * kVector];
    opmath_t unrounded_new_cell[kVector];
    for (int64_t gate = 0; gate < 3; ++gate) {
      for (int64_t i = 0; i < units; ++i) {
        activations[gate * kVector + i] = from.activations[gate * from.ld + i];
        bias[gate * kVector + i] = from.bias[gate * from.state_size + i];
      }
    }
    for (int64_t i = 0; i < units; ++i) {
      if constexpr (unrounded) {
        unrounded_old_cell[i] = from.unrounded_old_cell[i];
      } else {
        old_cell[i] = from.old_cell[i];
      }
    }
    compute<write_gates, unrounded>(
        {activations,
         kVector,
         bias,
         old_cell,
         new_h,
         new_cell,
         gates,
         unrounded_old_cell,
         unrounded_new_cell,
         kVector},
        0,
        kVector);
    for (int64_t i = 0; i < units; ++i) {
      from.new_h[i] = new_h[i];
      from.new_cell[i] = new_cell[i];
      if constexpr (unrounded) {
        from.unrounded_new_cell[i] = unrounded_new_cell[i];
      }
    }
    for (int64_t gate = 0; write_gates && gate < 3; ++gate) {
      for (int64_t i = 0; i < units; ++i) {
        from.gates[gate * from.state_size + i] = gates[gate * kVector + i];
      }
    }
  }

  template <bool write_gates, bool unrounded>
  C10_ALWAYS_INLINE void compute(const Units& of, int64_t first, int64_t size)
      const {
    compute<write_gates, unrounded>(
        of.activations + first,
        of.ld,
        of.bias + first,
        unrounded ? nullptr : of.old_cell + first,
        of.new_h + first,
        of.new_cell + first,
        write_gates ? of.gates + first : nullptr,
        unrounded ? of.unrounded_old_cell + first : nullptr,
        unrounded ? of.unrounded_new_cell + first : nullptr,
        of.state_size,
        size);
  }

  template <bool write_gates, bool unrounded>
  C10_ALWAYS_INLINE void compute(
      const opmath_t* __restrict__ activations,
      int64_t ld,
      const scalar_t* __restrict__ bias,
      const scalar_t* __restrict__ old_cell,
      scalar_t* __restrict__ new_h,
      scalar_t* __restrict__ new_cell,
      scalar_t* __restrict__ gates,
      const opmath_t* __restrict__ unrounded_old_cell,
      opmath_t* __restrict__ unrounded_new_cell,
      int64_t state_size,
      int64_t size) const {
    for (int64_t i = 0; i < size; ++i) {
      opmath_t cell;
      if constexpr (unrounded) {
        cell = unrounded_old_cell[i];
      } else {
        cell = load(old_cell[i]);
      }
      const auto out = cell_forward<opmath_t>(
          activations[i] + load(bias[i]),
          activations[i + ld] + load(bias[i + state_size]),
          activations[i + 2 * ld] + load(bias[i + 2 * state_size]),
          cell);
      if constexpr (unrounded) {
        unrounded_new_cell[i] = out.new_cell;
      }
      store(out.new_h, new_h[i]);
      store(out.new_cell, new_cell[i]);
      if constexpr (write_gates) {
        store(out.input_gate, gates[i]);
        store(out.output_gate, gates[i + state_size]);
        store(out.candidate, gates[i + 2 * state_size]);
      }
    }
  }
};

// From activations [rows, 3, ld].
template <typename scalar_t>
struct ForwardRows {
  using opmath_t = at::opmath_type<scalar_t>;

  ForwardBlock<scalar_t> block;
  const opmath_t* activations;
  int64_t ld;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t row = begin; row < end; ++row) {
      block.write_row(row, activations + row * 3 * ld, ld);
    }
  }
};

} // namespace lltm
