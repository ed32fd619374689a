#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/matrix.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// Forward, the gates and the new states, which are computed after the products.
// Backward, the gradients of the gates, which are computed before them. The
// bodies are for vectorized().
namespace lltm {

// What gates read beside the products, and what they write: contiguous rows, of
// which Gates computes those from first_row on.
template <typename scalar_t>
struct CellPointers {
  using opmath_t = at::opmath_type<scalar_t>;

  int64_t state_size;
  const opmath_t* bias;
  const opmath_t* old_cell;
  // new_cell before it is rounded, for the next step of a sequence. Null: not
  // wanted.
  opmath_t* next_cell;
  scalar_t* new_h;
  scalar_t* new_cell;
  scalar_t* gates; // null: not wanted
};

// Units [first_unit, end_unit) of the rows from first_row on.
template <typename scalar_t>
struct Gates {
  using opmath_t = at::opmath_type<scalar_t>;

  const CellPointers<scalar_t>& pointers;
  const opmath_t* products; // [rows, 3, ld], without bias, from first_unit on
  int64_t ld;
  int64_t first_row;
  int64_t first_unit;
  int64_t end_unit;

  // begin and end count rows of products. For half types, two vectors of
  // opmath_t are computed at a time, if a row of products holds as many. Each
  // is a long chain of operations, and two chains run side by side.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr auto lanes = Lanes<opmath_t, kBytes>::count;
    if constexpr (!std::is_same_v<scalar_t, opmath_t>) {
      if (ld >= 2 * lanes) {
        return all_units<2 * lanes>(begin, end);
      }
    }
    all_units<lanes>(begin, end);
  }

 private:
  template <int64_t kUnits>
  C10_ALWAYS_INLINE void all_units(int64_t begin, int64_t end) const {
    for (auto row = begin; row < end; ++row) {
      for (auto unit = first_unit; unit < end_unit; unit += kUnits) {
        const auto units = std::min(kUnits, end_unit - unit);
        if (pointers.gates == nullptr) {
          some_units<kUnits, false>(row, unit, units);
        } else {
          some_units<kUnits, true>(row, unit, units);
        }
      }
    }
  }

  template <int64_t kUnits, bool kWritesGates>
  C10_ALWAYS_INLINE void some_units(int64_t row, int64_t unit, int64_t units)
      const {
    const auto& p = pointers;
    const auto at = (first_row + row) * p.state_size + unit;
    opmath_t bias[3][kUnits], sums[3][kUnits], cell[kUnits];
    scalar_t gates[3][kUnits], new_cell[kUnits], new_h[kUnits];
    for (int64_t gate = 0; gate < 3; ++gate) {
      const auto* from = products + (3 * row + gate) * ld + unit - first_unit;
      read(from, units, sums[gate]);
      read(p.bias + gate * p.state_size + unit, units, bias[gate]);
    }
    read(p.old_cell + at, units, cell);
    // On local arrays. gcc assumes that a store through another pointer may
    // change the limits of gate_math.h, and would not vectorise the loop.
#pragma GCC ivdep
    for (int64_t i = 0; i < kUnits; ++i) {
      const auto out = cell_forward<opmath_t>(
          sums[0][i] + bias[0][i],
          sums[1][i] + bias[1][i],
          sums[2][i] + bias[2][i],
          cell[i]);
      cell[i] = out.new_cell;
      store(out.new_h, new_h[i]);
      store(out.new_cell, new_cell[i]);
      if constexpr (kWritesGates) {
        store(out.input_gate, gates[0][i]);
        store(out.output_gate, gates[1][i]);
        store(out.candidate, gates[2][i]);
      }
    }
    write(new_h, units, p.new_h + at);
    write(new_cell, units, p.new_cell + at);
    if (p.next_cell != nullptr) {
      write(cell, units, p.next_cell + at);
    }
    for (int64_t gate = 0; kWritesGates && gate < 3; ++gate) {
      auto* to = p.gates + 3 * (at - unit) + gate * p.state_size + unit;
      write(gates[gate], units, to);
    }
  }

  // It copies one whole vector: gcc would copy an array in parts of 16 bytes,
  // and the load of a vector waits until such parts are in the cache.
  template <int64_t kUnits, typename T>
  static C10_ALWAYS_INLINE void copy(const T* from, T* to) {
    typename Lanes<uint8_t, kUnits * sizeof(T)>::type lanes;
    load_lanes(from, lanes);
    store_lanes(lanes, to);
  }

  template <int64_t kUnits>
  static C10_ALWAYS_INLINE void
  read(const opmath_t* from, int64_t units, opmath_t (&to)[kUnits]) {
    if (units == kUnits) {
      copy<kUnits>(from, to);
    } else {
      std::fill_n(std::copy_n(from, units, to), kUnits - units, opmath_t(0));
    }
  }

  template <typename T, int64_t kUnits>
  static C10_ALWAYS_INLINE void
  write(const T (&from)[kUnits], int64_t units, T* to) {
    if (units == kUnits) {
      copy<kUnits>(from, to);
    } else {
      std::copy_n(from, units, to);
    }
  }
};

// Units [first_unit, end_unit) of some rows. In a sequence the gradients that
// pass between steps are not rounded: there cell_t is opmath_t.
template <typename scalar_t, typename gemm_t, typename cell_t>
struct GatesBackward {
  using opmath_t = at::opmath_type<scalar_t>;

  int64_t state_size;
  int64_t first_unit;
  int64_t end_unit;
  const scalar_t* grad_h;
  const scalar_t* grad_cell;
  const scalar_t* new_cell;
  const scalar_t* gates;
  Matrix<gemm_t> d_gates; // of the pre-activations
  const opmath_t* d_h;    // from the step after this one; null: there is none
  // Like d_h where that is not null, then the gradient of the old cell state.
  // Null: there is no step after this one, and it is not wanted.
  cell_t* d_cell;

  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    if (d_h != nullptr) {
      return rows<true, true>(begin, end);
    }
    d_cell != nullptr ? rows<false, true>(begin, end)
                      : rows<false, false>(begin, end);
  }

 private:
  template <bool kHasStepAfter, bool kWritesCell>
  C10_ALWAYS_INLINE void rows(int64_t begin, int64_t end) const {
    for (auto row = begin; row < end; ++row) {
      const auto at = row * state_size;
      one_row<kHasStepAfter, kWritesCell>(
          grad_h + at,
          grad_cell + at,
          new_cell + at,
          gates + 3 * at,
          d_gates.row(row),
          kHasStepAfter ? d_h + at : nullptr,
          kWritesCell ? d_cell + at : nullptr);
    }
  }

  template <bool kHasStepAfter, bool kWritesCell>
  C10_ALWAYS_INLINE void one_row(
      const scalar_t* __restrict__ grad_h,
      const scalar_t* __restrict__ grad_cell,
      const scalar_t* __restrict__ new_cell,
      const scalar_t* __restrict__ gates,
      gemm_t* __restrict__ d_gates,
      const opmath_t* __restrict__ d_h,
      cell_t* __restrict__ d_cell) const {
    for (auto i = first_unit; i < end_unit; ++i) {
      auto d_new_h = load(grad_h[i]);
      auto d_new_cell = load(grad_cell[i]);
      if constexpr (kHasStepAfter) {
        d_new_h += d_h[i];
        d_new_cell += load(d_cell[i]);
      }
      const auto out = cell_backward<opmath_t>(
          d_new_h,
          d_new_cell,
          lltm::tanh(load(new_cell[i])),
          load(gates[i]),
          load(gates[i + state_size]),
          load(gates[i + 2 * state_size]));
      store(out.d_input_gate, d_gates[i]);
      store(out.d_output_gate, d_gates[i + state_size]);
      store(out.d_candidate, d_gates[i + 2 * state_size]);
      if constexpr (kWritesCell) {
        store(out.d_old_cell, d_cell[i]);
      }
    }
  }
};

} // namespace lltm
