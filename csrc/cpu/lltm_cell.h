#pragma once

#include "cpu/primitives/convert.h"
#include "cpu/primitives/registers.h"
#include "ops/gate_math.h"

#include <ATen/OpMathType.h>
#include <c10/macros/Macros.h>

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
// which PointwiseForward computes those from first_row on.
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

// Calls body.some_units<vec_t>(row, unit) for all units of body in these rows,
// a vector at a time. Of double a vector is one number, because its functions
// are those of the C library.
template <typename opmath_t, int64_t kBytes, typename Body>
C10_ALWAYS_INLINE void
in_rows_of_units(const Body& body, int64_t begin, int64_t end) {
  constexpr auto bytes =
      std::is_same_v<opmath_t, double> ? sizeof(double) : kBytes;
  for (auto row = begin; row < end; ++row) {
    in_vectors<opmath_t, bytes>(
        body.first_unit,
        body.end_unit,
        [&]<typename vec_t>(int64_t unit) __attribute__((always_inline)) {
          body.template some_units<vec_t>(row, unit);
        });
  }
}

// A body for run_with_best_isa(): units [first_unit, end_unit) of the rows from
// first_row on.
template <typename scalar_t>
struct PointwiseForward {
  using opmath_t = at::opmath_type<scalar_t>;

  const CellPointers<scalar_t>& pointers;
  // [rows, kGates, ld], without bias, from first_unit on.
  const opmath_t* products;
  int64_t ld;
  int64_t first_row;
  int64_t first_unit;
  int64_t end_unit;

  // begin and end count rows of products.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    in_rows_of_units<opmath_t, kBytes>(*this, begin, end);
  }

  template <typename vec_t>
  C10_ALWAYS_INLINE void some_units(int64_t row, int64_t unit) const {
    const auto& p = pointers;
    const CellMath<vec_t, opmath_t> math(p.math);
    const auto at = (first_row + row) * p.state_size + unit;
    const auto* sums = products + kGates * row * ld + unit - first_unit;
    const auto* bias = p.bias + unit;
    const auto out = math.forward(
        load_opmath<vec_t>(sums) + load_opmath<vec_t>(bias),
        load_opmath<vec_t>(sums + ld) + load_opmath<vec_t>(bias + p.state_size),
        load_opmath<vec_t>(sums + 2 * ld) +
            load_opmath<vec_t>(bias + 2 * p.state_size),
        load_opmath<vec_t>(p.old_cell + at));
    store_opmath(out.new_h, p.new_h + at);
    store_opmath(out.new_cell, p.new_cell + at);
    if (p.next_cell != nullptr) {
      store_opmath(out.new_cell, p.next_cell + at);
    }
    if (p.gates != nullptr) {
      auto* gates = p.gates + kGates * (at - unit) + unit;
      store_opmath(out.input_gate, gates);
      store_opmath(out.output_gate, gates + p.state_size);
      store_opmath(out.candidate, gates + 2 * p.state_size);
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
