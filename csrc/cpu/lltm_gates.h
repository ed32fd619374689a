#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/lanes.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

// What follows the products of the forward step: the gates, and the new states.
namespace lltm {

// Contiguous rows of state_size, from the first row that is computed.
template <typename scalar_t>
struct States {
  using opmath_t = at::opmath_type<scalar_t>;

  int64_t state_size;
  const scalar_t* bias;
  const opmath_t* old_cell;
  opmath_t* next_cell; // not rounded; null: not wanted
  scalar_t* new_h;
  scalar_t* new_cell;
  scalar_t* gates; // null: not wanted
};

// Units [first_unit, end_unit) of some rows. The body is for vectorized().
template <typename scalar_t>
struct Gates {
  using opmath_t = at::opmath_type<scalar_t>;

  const States<scalar_t>& states;
  const opmath_t* products; // [rows, 3, ld], without bias, from first_unit on
  int64_t ld;
  int64_t first_unit;
  int64_t end_unit;

  // Rows.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    constexpr auto kUnits = Lanes<opmath_t, kBytes>::count;
    for (auto unit = first_unit; unit < end_unit; unit += kUnits) {
      some_units<kUnits>(unit, std::min(kUnits, end_unit - unit), begin, end);
    }
  }

 private:
  template <int64_t kUnits>
  C10_ALWAYS_INLINE void
  some_units(int64_t unit, int64_t units, int64_t begin, int64_t end) const {
    const auto& s = states;
    opmath_t bias[3][kUnits] = {};
    for (int64_t gate = 0; gate < 3; ++gate) {
      read(s.bias + gate * s.state_size + unit, units, bias[gate]);
    }
    for (auto row = begin; row < end; ++row) {
      const auto at = row * s.state_size + unit;
      opmath_t gates[3][kUnits], cell[kUnits], h[kUnits];
      for (int64_t gate = 0; gate < 3; ++gate) {
        const auto* from = products + (3 * row + gate) * ld + unit - first_unit;
        copy<kUnits>(from, gates[gate]);
      }
      read(s.old_cell + at, units, cell);
      compute(bias, gates, cell, h);
      write(h, units, s.new_h + at);
      write(cell, units, s.new_cell + at);
      if (s.next_cell != nullptr) {
        write(cell, units, s.next_cell + at);
      }
      for (int64_t gate = 0; s.gates != nullptr && gate < 3; ++gate) {
        auto* to = s.gates + (3 * row + gate) * s.state_size + unit;
        write(gates[gate], units, to);
      }
    }
  }

  // On arrays of the caller's own: a store through any other pointer might
  // change the limits of gate_math.h, for all that gcc knows, and it would not
  // vectorise the loop.
  template <int64_t kUnits>
  static C10_ALWAYS_INLINE void compute(
      const opmath_t (&bias)[3][kUnits],
      opmath_t (&gates)[3][kUnits],
      opmath_t (&cell)[kUnits],
      opmath_t (&h)[kUnits]) {
#pragma GCC ivdep
    for (int64_t i = 0; i < kUnits; ++i) {
      const auto out = cell_forward<opmath_t>(
          gates[0][i] + bias[0][i],
          gates[1][i] + bias[1][i],
          gates[2][i] + bias[2][i],
          cell[i]);
      gates[0][i] = out.input_gate;
      gates[1][i] = out.output_gate;
      gates[2][i] = out.candidate;
      cell[i] = out.new_cell;
      h[i] = out.new_h;
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

  template <typename from_t, int64_t kUnits>
  static C10_ALWAYS_INLINE void
  read(const from_t* from, int64_t units, opmath_t (&to)[kUnits]) {
    from_t values[kUnits] = {};
    if (units == kUnits) {
      copy<kUnits>(from, values);
    } else {
      std::copy_n(from, units, values);
    }
#pragma GCC unroll 1
    for (int64_t i = 0; i < kUnits; ++i) {
      to[i] = load(values[i]);
    }
  }

  template <typename to_t, int64_t kUnits>
  static C10_ALWAYS_INLINE void
  write(const opmath_t (&from)[kUnits], int64_t units, to_t* to) {
    to_t values[kUnits];
#pragma GCC unroll 1
    for (int64_t i = 0; i < kUnits; ++i) {
      store(from[i], values[i]);
    }
    if (units == kUnits) {
      copy<kUnits>(values, to);
    } else {
      std::copy_n(values, units, to);
    }
  }
};

} // namespace lltm
