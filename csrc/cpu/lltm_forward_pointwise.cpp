#include "cpu/lltm_forward_pointwise.h"

#include "cpu/primitives/convert.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/vectorize.h"
#include "ops/gate_math.h"

#include <c10/macros/Macros.h>

#include <algorithm>
#include <type_traits>

namespace lltm {

namespace {

// Consecutive hidden units of a row. The three gates lie ld apart in products,
// and state_size apart in bias and gates.
template <typename scalar_t>
struct Units {
  using opmath_t = at::opmath_type<scalar_t>;

  const opmath_t* products;
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

// A vector that fewer units are copied to and padded in.
template <typename scalar_t, bool write_gates, bool unrounded>
struct PaddedUnits {
  using opmath_t = at::opmath_type<scalar_t>;

  opmath_t products[3 * kVector];
  scalar_t bias[3 * kVector];
  scalar_t old_cell[kVector];
  scalar_t new_h[kVector];
  scalar_t new_cell[kVector];
  scalar_t gates[3 * kVector];
  opmath_t unrounded_old_cell[kVector];
  opmath_t unrounded_new_cell[kVector];

  C10_ALWAYS_INLINE Units<scalar_t> read(
      const Units<scalar_t>& from,
      int64_t size) {
    for (int64_t gate = 0; gate < 3; ++gate) {
      for (int64_t i = 0; i < kVector; ++i) {
        const bool exists = i < size;
        products[gate * kVector + i] =
            exists ? from.products[gate * from.ld + i] : opmath_t(0);
        bias[gate * kVector + i] =
            exists ? from.bias[gate * from.state_size + i] : scalar_t(0);
      }
    }
    for (int64_t i = 0; i < kVector; ++i) {
      if constexpr (unrounded) {
        unrounded_old_cell[i] =
            i < size ? from.unrounded_old_cell[i] : opmath_t(0);
      } else {
        old_cell[i] = i < size ? from.old_cell[i] : scalar_t(0);
      }
    }
    return {
        products,
        kVector,
        bias,
        old_cell,
        new_h,
        new_cell,
        gates,
        unrounded_old_cell,
        unrounded_new_cell,
        kVector};
  }

  C10_ALWAYS_INLINE void write(const Units<scalar_t>& to, int64_t size) const {
    for (int64_t i = 0; i < size; ++i) {
      to.new_h[i] = new_h[i];
      to.new_cell[i] = new_cell[i];
      if constexpr (unrounded) {
        to.unrounded_new_cell[i] = unrounded_new_cell[i];
      }
      for (int64_t gate = 0; write_gates && gate < 3; ++gate) {
        to.gates[gate * to.state_size + i] = gates[gate * kVector + i];
      }
    }
  }
};

template <typename scalar_t>
struct ForwardPointwise {
  using opmath_t = at::opmath_type<scalar_t>;

  const ForwardPointers<scalar_t>& pointers;
  const ForwardProducts<opmath_t>& products;

  // Rows of products.
  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    if (pointers.gates == nullptr) {
      write_rows<false>(begin, end);
    } else {
      write_rows<true>(begin, end);
    }
  }

  template <bool write_gates>
  C10_ALWAYS_INLINE void write_rows(int64_t begin, int64_t end) const {
    if constexpr (!std::is_same_v<scalar_t, opmath_t>) {
      if (pointers.unrounded_old_cell != nullptr) {
        return write_rows<write_gates, true>(begin, end);
      }
    }
    write_rows<write_gates, false>(begin, end);
  }

  template <bool write_gates, bool unrounded>
  C10_ALWAYS_INLINE void write_rows(int64_t begin, int64_t end) const {
    const auto& p = products;
    const auto size = p.end_unit - p.first_unit;
    for (int64_t row = begin; row < end; ++row) {
      write_units<write_gates, unrounded>(
          units<write_gates, unrounded>(row), size);
    }
  }

  template <bool write_gates, bool unrounded>
  C10_ALWAYS_INLINE Units<scalar_t> units(int64_t row_of_products) const {
    const auto& a = pointers;
    const auto unit = products.first_unit;
    const auto row = products.first_row + row_of_products;
    const auto at = row * a.state_size + unit;
    return {
        products.data + row_of_products * 3 * products.ld,
        products.ld,
        a.bias + unit,
        unrounded ? nullptr : a.old_cell + at,
        a.new_h + at,
        a.new_cell + at,
        write_gates ? a.gates + row * 3 * a.state_size + unit : nullptr,
        unrounded ? a.unrounded_old_cell + at : nullptr,
        unrounded ? a.unrounded_new_cell + at : nullptr,
        a.state_size};
  }

  // Computes whole vectors. If size is not a multiple, the last vector overlaps
  // the one before it. If there is none before it, units are padded to a
  // vector, unless padding costs more than it gains.
  template <bool write_gates, bool unrounded>
  C10_ALWAYS_INLINE void write_units(const Units<scalar_t>& all, int64_t size)
      const {
    PaddedUnits<scalar_t, write_gates, unrounded> padded;
    const bool pads = size >= 5 && size < kVector;
    const auto of = pads ? padded.read(all, size) : all;
    const auto end = pads ? kVector : size;
    int64_t first = 0;
    int64_t last = end < kVector ? end : end / kVector * kVector;
    // A loop that runs once or twice, so that what is inlined is inlined once.
#pragma GCC unroll 1
    while (first < last) {
      compute<write_gates, unrounded>(
          of.products + first,
          of.ld,
          of.bias + first,
          unrounded ? nullptr : of.old_cell + first,
          of.new_h + first,
          of.new_cell + first,
          write_gates ? of.gates + first : nullptr,
          unrounded ? of.unrounded_old_cell + first : nullptr,
          unrounded ? of.unrounded_new_cell + first : nullptr,
          of.state_size,
          last - first);
      first = last == end ? end : end - kVector;
      last = end;
    }
    if (pads) {
      padded.write(all, size);
    }
  }

  template <bool write_gates, bool unrounded>
  C10_ALWAYS_INLINE void compute(
      const opmath_t* __restrict__ products,
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
          products[i] + load(bias[i]),
          products[i + ld] + load(bias[i + state_size]),
          products[i + 2 * ld] + load(bias[i + 2 * state_size]),
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

} // namespace

template <typename scalar_t>
void forward_pointwise(
    const ForwardPointers<scalar_t>& pointers,
    const ForwardProducts<at::opmath_type<scalar_t>>& products) {
  vectorized<ForwardPointwise<scalar_t>>()(
      {pointers, products}, 0, products.rows);
}

template void forward_pointwise(
    const ForwardPointers<double>&,
    const ForwardProducts<double>&);
template void forward_pointwise(
    const ForwardPointers<float>&,
    const ForwardProducts<float>&);
template void forward_pointwise(
    const ForwardPointers<c10::Half>&,
    const ForwardProducts<float>&);
template void forward_pointwise(
    const ForwardPointers<c10::BFloat16>&,
    const ForwardProducts<float>&);

} // namespace lltm
