#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/registers.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// The cell: its sizes, where its arguments and results lie, and the gates and
// new states, which are computed after the products.
namespace lltm {

struct CellSizes {
  int64_t batch;
  int64_t input_features;
  int64_t state_size;

  // Columns of weights.
  int64_t features() const {
    return state_size + input_features;
  }

  // Rows of weights.
  int64_t gate_units() const {
    return kGates * state_size;
  }

  // Whether rows of weights divide into the pairs that bfloat16 multiplies.
  bool has_whole_pairs() const {
    return state_size % 2 == 0 && input_features % 2 == 0;
  }
};

// What gates read beside the products, and what they write: contiguous rows, of
// which Gates computes those from first_row on.
template <typename scalar_t>
struct CellPointers {
  using opmath_t = at::opmath_type<scalar_t>;

  int64_t state_size;
  CellMath<opmath_t> math;
  const opmath_t* bias;
  const opmath_t* old_cell;
  // new_cell before it is rounded, for the next step of a sequence. Null: not
  // wanted.
  opmath_t* next_cell;
  scalar_t* new_h;
  scalar_t* new_cell;
  scalar_t* gates; // null: not wanted
};

// A body for run_with_best_isa(): units [first_unit, end_unit) of the rows from
// first_row on.
template <typename scalar_t>
struct Gates {
  using opmath_t = at::opmath_type<scalar_t>;

  const CellPointers<scalar_t>& pointers;
  // [rows, kGates, ld], without bias, from first_unit on.
  const opmath_t* products;
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
  template <int64_t kLanes>
  C10_ALWAYS_INLINE void all_units(int64_t begin, int64_t end) const {
    for (auto row = begin; row < end; ++row) {
      for (auto unit = first_unit; unit < end_unit; unit += kLanes) {
        const auto units = std::min(kLanes, end_unit - unit);
        if (pointers.gates == nullptr) {
          some_units<kLanes, false>(row, unit, units);
        } else {
          some_units<kLanes, true>(row, unit, units);
        }
      }
    }
  }

  template <int64_t kLanes, bool kWritesGates>
  C10_ALWAYS_INLINE void some_units(int64_t row, int64_t unit, int64_t units)
      const {
    const auto& p = pointers;
    const auto math = p.math;
    const auto at = (first_row + row) * p.state_size + unit;
    opmath_t bias[kGates][kLanes], sums[kGates][kLanes], cell[kLanes];
    scalar_t gates[kGates][kLanes], new_cell[kLanes], new_h[kLanes];
    for (int64_t gate = 0; gate < kGates; ++gate) {
      const auto* from =
          products + (kGates * row + gate) * ld + unit - first_unit;
      load_some(from, units, sums[gate]);
      load_some(p.bias + gate * p.state_size + unit, units, bias[gate]);
    }
    load_some(p.old_cell + at, units, cell);
    // On local arrays. gcc assumes that a store through another pointer may
    // change the limits of gate_math.h, and would not vectorise the loop.
#pragma GCC ivdep
    for (int64_t i = 0; i < kLanes; ++i) {
      const auto out = math.forward(
          sums[0][i] + bias[0][i],
          sums[1][i] + bias[1][i],
          sums[2][i] + bias[2][i],
          cell[i]);
      cell[i] = out.new_cell;
      from_opmath(out.new_h, new_h[i]);
      from_opmath(out.new_cell, new_cell[i]);
      if constexpr (kWritesGates) {
        from_opmath(out.input_gate, gates[0][i]);
        from_opmath(out.output_gate, gates[1][i]);
        from_opmath(out.candidate, gates[2][i]);
      }
    }
    store_some(new_h, units, p.new_h + at);
    store_some(new_cell, units, p.new_cell + at);
    if (p.next_cell != nullptr) {
      store_some(cell, units, p.next_cell + at);
    }
    for (int64_t gate = 0; kWritesGates && gate < kGates; ++gate) {
      auto* to = p.gates + kGates * (at - unit) + gate * p.state_size + unit;
      store_some(gates[gate], units, to);
    }
  }

  // It copies one whole vector: gcc would copy an array in parts of 16 bytes,
  // and the load of a vector waits until such parts are in the cache.
  template <int64_t kLanes, typename T>
  static C10_ALWAYS_INLINE void copy(const T* from, T* to) {
    typename Lanes<uint8_t, kLanes * sizeof(T)>::type lanes;
    load_lanes(from, lanes);
    store_lanes(lanes, to);
  }

  template <int64_t kLanes>
  static C10_ALWAYS_INLINE void
  load_some(const opmath_t* from, int64_t units, opmath_t (&to)[kLanes]) {
    if (units == kLanes) {
      copy<kLanes>(from, to);
    } else {
      std::fill_n(std::copy_n(from, units, to), kLanes - units, opmath_t(0));
    }
  }

  template <typename T, int64_t kLanes>
  static C10_ALWAYS_INLINE void
  store_some(const T (&from)[kLanes], int64_t units, T* to) {
    if (units == kLanes) {
      copy<kLanes>(from, to);
    } else {
      std::copy_n(from, units, to);
    }
  }
};

// To contiguous memory.
template <typename scalar_t>
struct ForwardPointers {
  CellSizes sizes;
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* old_h;
  CellPointers<scalar_t> cell;
};

// The cell as a whole, which a short sequence calls for each step
// (lltm_forward.cpp).
template <typename scalar_t>
void cell_forward(const ForwardPointers<scalar_t>& pointers);

} // namespace lltm
