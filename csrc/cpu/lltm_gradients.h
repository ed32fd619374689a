#pragma once

#include "cpu/lltm_gates.h"
#include "cpu/primitives/matrix.h"
#include "cpu/primitives/panels.h"
#include "cpu/primitives/product_on_threads.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/work.h"
#include "ops/lltm.h"

#include <ATen/EmptyTensor.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <c10/macros/Macros.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

// The gradients of weights, bias, input and h, computed from d_gates, the
// gradients of the pre-activations of some rows; and their memory.
namespace lltm {

// Memory for the gradients that output_mask asks for: of input, weights, bias,
// and of h and the cell state, which have the sizes of initial. The gradients
// are zeros if computed is empty, because the kernels then write none of them.
inline BackwardResult empty_gradients(
    const at::Tensor& computed,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& initial,
    OutputMask output_mask) {
  const auto empty = [&](bool wanted, at::IntArrayRef sizes) {
    at::Tensor memory;
    if (wanted) {
      // lltm_forward.cpp says why it is not at::empty().
      memory = at::detail::empty_cpu(sizes, input.options());
      if (computed.numel() == 0) {
        memory.zero_();
      }
    }
    return memory;
  };
  return {
      empty(output_mask[0], input.sizes()),
      empty(output_mask[1], weights.sizes()),
      empty(output_mask[2], {weights.size(0)}),
      empty(output_mask[3], initial.sizes()),
      empty(output_mask[4], initial.sizes())};
}

// Gradients that are null are not wanted.
template <typename scalar_t>
struct GradientPointers {
  scalar_t* d_input;
  scalar_t* d_weights;
  scalar_t* d_bias;
  scalar_t* d_old_h; // of a sequence: of h0
  scalar_t* d_old_cell;
};

template <typename scalar_t>
GradientPointers<scalar_t> pointers_to(const BackwardResult& gradients) {
  return std::apply(
      [](const auto&... tensors) {
        return GradientPointers<scalar_t>{
            tensors.defined() ? tensors.template mutable_data_ptr<scalar_t>()
                              : nullptr...};
      },
      gradients);
}

// d_gates in the two layouts that products need: rows [batch, gate_units] for
// products with weights, and transposed for products with input and h, if that
// is wanted.
template <typename gemm_t>
class GateGradients {
 public:
  GateGradients(int64_t most_rows, int64_t gate_units, bool wants_transposed)
      : gate_units_(gate_units),
        ld_rows_(leading_dimension<gemm_t>(padded(gate_units))),
        ld_transposed_(leading_dimension<gemm_t>(padded(most_rows))),
        rows_(most_rows * ld_rows_),
        transposed_(wants_transposed ? gate_units * ld_transposed_ : 0) {
    zero(rows(), most_rows, gate_units);
  }

  Matrix<gemm_t> rows() const {
    return {rows_.data(), ld_rows_};
  }

  Matrix<gemm_t> transposed() const {
    return {transposed_.data(), ld_transposed_};
  }

  // Transposes so many rows.
  void transpose(int64_t batch) const {
    constexpr int64_t at_once = 16;
    at::parallel_for(
        0,
        at::divup(batch, at_once),
        grain_size(at_once * gate_units_ / kPackedPerNanosecond),
        [&](int64_t begin, int64_t end) {
          const auto first = begin * at_once;
          const auto size = std::min(end * at_once, batch) - first;
          vectorized(
              Transpose<gemm_t, gemm_t>{
                  .from = rows().part(first, 0),
                  .rows = size,
                  .padded = size,
                  .to = transposed().part(0, first)},
              0,
              gate_units_);
        });
    zero(transposed(), gate_units_, batch);
  }

 private:
  static int64_t padded(int64_t terms) {
    return Product<gemm_t>::padded_terms(terms);
  }

  static void zero(Matrix<gemm_t> to, int64_t rows, int64_t size) {
    for (int64_t row = 0; padded(size) > size && row < rows; ++row) {
      std::fill(to.row(row) + size, to.row(row) + padded(size), gemm_t(0));
    }
  }

  const int64_t gate_units_;
  const int64_t ld_rows_;
  const int64_t ld_transposed_;
  const Scratch<gemm_t> rows_;
  const Scratch<gemm_t> transposed_;
};

// d_weights = or += d_gates.T @ [old_h, input]
template <typename scalar_t, typename gemm_t, typename out_t>
void weights_gradient(
    const CellSizes& sizes,
    const GateGradients<gemm_t>& d_gates,
    const scalar_t* old_h,
    const scalar_t* input,
    out_t* d_weights,
    bool accumulate) {
  const auto product = [&](const scalar_t* B, int64_t N, out_t* C) {
    ProductOnThreads<scalar_t, gemm_t, out_t>({.M = sizes.gate_units(),
                                               .N = N,
                                               .K = sizes.batch,
                                               .A = d_gates.transposed(),
                                               .B = {B, N},
                                               .C = {C, sizes.features()},
                                               .accumulate = accumulate})
        .run();
  };
  product(old_h, sizes.state_size, d_weights);
  product(input, sizes.input_features, d_weights + sizes.state_size);
}

// result, the gradient of old_h or of input, = d_gates @ the columns of weights
// that it is multiplied by.
template <typename scalar_t, typename gemm_t>
void operand_gradient(
    const CellSizes& sizes,
    const GateGradients<gemm_t>& d_gates,
    const scalar_t* columns_of_weights,
    int64_t columns,
    scalar_t* result) {
  ProductOnThreads<scalar_t, gemm_t, scalar_t>(
      {.M = sizes.batch,
       .N = columns,
       .K = sizes.gate_units(),
       .A = d_gates.rows(),
       .B = {columns_of_weights, sizes.features()},
       .C = {result, columns},
       .accumulate = false})
      .run();
}

// d_bias = or += sums over the rows. Sums of 64 rows are added up in double:
// one float chain over a large batch has ten times the error of PyTorch's sum.
template <typename out_t, typename gemm_t>
struct BiasGradient {
  Matrix<const gemm_t> d_gates;
  int64_t batch;
  out_t* d_bias;
  bool accumulate;

  // begin and end count gate units.
  template <int64_t kBytes>
  C10_ALWAYS_INLINE void run(int64_t begin, int64_t end) const {
    using opmath_t = at::opmath_type<out_t>;
    constexpr int64_t units = 128, rows = 64;
    for (auto unit = begin; unit < end; unit += units) {
      const auto size = std::min(units, end - unit);
      double totals[units] = {};
      for (int64_t first = 0; first < batch; first += rows) {
        opmath_t sums[units] = {};
        for (auto row = first; row < std::min(first + rows, batch); ++row) {
          add(d_gates.row(row) + unit, sums, size);
        }
        add(sums, totals, size);
      }
      for (int64_t i = 0; i < size; ++i) {
        auto& to = d_bias[unit + i];
        store(opmath_t(accumulate ? load(to) + totals[i] : totals[i]), to);
      }
    }
  }

 private:
  template <typename from_t, typename sum_t>
  C10_ALWAYS_INLINE static void add(
      const from_t* __restrict__ values,
      sum_t* __restrict__ sums,
      int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      sums[i] += load(values[i]);
    }
  }
};

template <typename out_t, typename gemm_t>
void bias_gradient(
    const CellSizes& sizes,
    const GateGradients<gemm_t>& d_gates,
    out_t* d_bias,
    bool accumulate) {
  at::parallel_for(
      0,
      sizes.gate_units(),
      grain_size(sizes.batch / kPackedPerNanosecond),
      [&](int64_t begin, int64_t end) {
        vectorized(
            BiasGradient<out_t, gemm_t>{
                d_gates.rows(), sizes.batch, d_bias, accumulate},
            begin,
            end);
      });
}

} // namespace lltm
