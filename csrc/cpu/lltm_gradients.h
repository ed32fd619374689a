#pragma once

#include "cpu/cell_sizes.h"
#include "cpu/choices.h"
#include "cpu/primitives/convert.h"
#include "cpu/primitives/cpu_capability.h"
#include "cpu/primitives/gemm.h"
#include "cpu/primitives/gemm_of_rows.h"
#include "cpu/primitives/lanes.h"
#include "cpu/primitives/pack.h"
#include "cpu/primitives/product.h"
#include "cpu/primitives/scratch.h"
#include "cpu/primitives/vectorize.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

// What follows from d_gates, the gradients of the pre-activations of some rows:
// the gradients of weights, bias, input and h.
namespace lltm {

// Terms that oneDNN's products take, with zeros beyond size: a few numbers, for
// it generates a kernel for each and keeps it.
template <typename gemm_t>
int64_t terms_of(int64_t size) {
  if (size < kVector) {
    return round_up(size, kPair<gemm_t>);
  }
  return padded_terms<gemm_t>(round_up(size, size > kMaxK<gemm_t> ? 32 : 8));
}

// How far rows of so many terms lie apart: also one of a few numbers, and none
// that puts all rows on the same sets of a cache.
template <typename gemm_t>
int64_t leading_dimension(int64_t size) {
  const auto ld = size > kMaxK<gemm_t> ? round_up(size, kMaxK<gemm_t>)
                                       : terms_of<gemm_t>(size);
  return kPair<gemm_t> == 1 && ld % 64 == 0 ? ld + 16 : ld;
}

// d_gates in the two layouts that products need: rows [batch, ld_rows] for
// products with weights, and columns, the transpose, [units, ld_columns] for
// those with input and h. Either may be null.
template <typename gemm_t>
struct GateGradients {
  int64_t batch;
  int64_t units; // 3 * state_size
  gemm_t* rows;
  gemm_t* columns;
  int64_t ld_rows = leading_dimension<gemm_t>(units);
  int64_t ld_columns = leading_dimension<gemm_t>(batch);

  void zero_padding() const {
    zero_padding(rows, batch, units, ld_rows);
    zero_padding(columns, units, batch, ld_columns);
  }

 private:
  static void
  zero_padding(gemm_t* data, int64_t rows, int64_t size, int64_t ld) {
    const auto padding = terms_of<gemm_t>(size) - size;
    for (int64_t row = 0; data != nullptr && padding > 0 && row < rows; ++row) {
      std::fill_n(data + row * ld + size, padding, gemm_t(0));
    }
  }
};

// How a product is divided, and by what it is multiplied: oneDNN, or the tile.
struct Blocks {
  bool by_onednn;
  // Each task computes so many rows and columns of the result.
  int64_t rows;
  int64_t columns;
  // So many rows of B are packed at a time.
  int64_t terms;
  // Whether oneDNN takes all rows of a block in one call. It generates a kernel
  // for each number of them, so they must not follow from the batch.
  bool in_one_call = false;
};

// Whether oneDNN may multiply, as it does with pairs. With AVX-512 it is ahead
// of the tile in large products: on the Xeon backward would take 5 to 10 % more
// at 256x1024x1024, at 64x1024x1024, and in sequences of 512 units.
template <typename gemm_t>
bool is_onednn_faster() {
  return kPair<gemm_t> == 2 ||
      (std::is_same_v<gemm_t, float> &&
       cpu_capability() == CPUCapability::kAVX512);
}

// One thread takes whole panels of the tile, which are 48 columns or half as
// many. Several threads get as many columns each.
inline int64_t columns_of_a_block(int64_t size, int64_t most) {
  constexpr int64_t panel = 48;
  return at::get_num_threads() > 1
      ? size_of_a_block(size, most)
      : round_up(at::divup(size, at::divup(size, most)), panel);
}

template <typename scalar_t, typename gemm_t>
Blocks blocks_of_weights(int64_t M, int64_t N, int64_t K) {
  if (kPair<gemm_t> == 2 || (K >= 32 && is_onednn_faster<gemm_t>())) {
    const auto most = weights_panel(K, sizeof(gemm_t));
    const auto columns = round_up(at::divup(N, at::divup(N, most)), kVector);
    const auto rows = at::divup(M, at::divup(M, kWeightsBlock / columns));
    return {true, rows, columns, kMaxK<gemm_t>, /*in_one_call=*/true};
  }
  if (K <= kFewTerms) {
    return {false, size_of_a_block(M, 64), N, K};
  }
  return {false, size_of_a_block(M, 384), columns_of_a_block(N, 768), K};
}

template <typename scalar_t, typename gemm_t>
Blocks blocks_of_rows(int64_t M, int64_t N, int64_t K) {
  const auto rows = std::min(M, kRowsOfATask);
  if (M >= 128 && is_onednn_faster<gemm_t>()) {
    const int64_t most = kPair<gemm_t> == 2 ? 512 : 128;
    return {true, rows, size_of_a_block(N, most), 512};
  }
  if (sizeof(scalar_t) == 2) {
    const bool by_onednn = kPair<gemm_t> == 2;
    return M < 128 ? Blocks{by_onednn, rows, size_of_a_block(N, 1024), 128}
                   : Blocks{by_onednn, rows, size_of_a_block(N, 128), 512};
  }
  if (M <= kFewRows) {
    return {false, M, size_of_a_block(N, N), K};
  }
  // Rows share what is copied of the weights.
  const auto rows_of_a_block = M < 128 ? M : size_of_a_block(M, 384);
  return {false, rows_of_a_block, columns_of_a_block(N, 768), K};
}

// C [M, N] = A @ B, or C += A @ B, on all threads. A has terms_of(K). B is
// packed if it is converted, or multiplied by oneDNN. C is computed in
// opmath_t.
template <typename scalar_t, typename gemm_t, typename out_t>
class ProductOnThreads {
 public:
  ProductOnThreads(
      int64_t M,
      int64_t N,
      int64_t K,
      const gemm_t* A,
      int64_t lda,
      const scalar_t* B,
      int64_t ldb,
      out_t* C,
      int64_t ldc,
      bool accumulate,
      const Blocks& blocks)
      : M_(M),
        N_(N),
        K_(K),
        A_(A),
        lda_(lda),
        B_(B),
        ldb_(ldb),
        C_(C),
        ldc_(ldc),
        accumulate_(accumulate),
        blocks_(blocks),
        packed_(packs_ && row_blocks_ > 1 ? panels_ * width_ * terms_ : 0) {}

  void run() const {
    if (packs_ && row_blocks_ > 1) {
      at::parallel_for(
          0,
          panels_,
          grain_size(terms_ * width_ / kPackedPerNanosecond),
          [&](int64_t begin, int64_t end) {
            for (auto panel = begin; panel < end; ++panel) {
              pack(panel, 0, terms_, packed_.data() + panel * width_ * terms_);
            }
          });
    }
    const auto nanoseconds = std::max<int64_t>(2 * terms_, 20) * blocks_.rows *
        blocks_.columns / kFlopPerNanosecond;
    at::parallel_for(
        0,
        row_blocks_ * panels_,
        grain_size(nanoseconds),
        [&](int64_t begin, int64_t end) {
          const Scratch<opmath_t> sums(
              kInPlace ? 0 : blocks_.rows * blocks_.columns);
          const Scratch<gemm_t> panel(
              packs_ && row_blocks_ == 1 ? blocks_.terms * width_ : 0);
          for (auto task = begin; task < end; ++task) {
            one_block(
                task / panels_ * blocks_.rows,
                task % panels_,
                sums.data(),
                panel.data());
          }
          release_gemm<gemm_t>();
        });
  }

 private:
  using opmath_t = at::opmath_type<out_t>;
  static constexpr bool kInPlace = std::is_same_v<out_t, opmath_t>;
  static constexpr bool kAlwaysPacks =
      !std::is_same_v<scalar_t, gemm_t> || kPair<gemm_t> == 2;

  void pack(int64_t panel, int64_t k, int64_t terms, gemm_t* to) const {
    const auto column = panel * blocks_.columns;
    vectorized<PackRows<scalar_t, gemm_t>>()(
        {B_ + k * ldb_ + column,
         ldb_,
         K_ - k,
         std::min(blocks_.columns, N_ - column),
         to,
         width_},
        0,
        terms / kPair<gemm_t>);
  }

  void one_block(int64_t row, int64_t panel, opmath_t* sums, gemm_t* scratch)
      const {
    const auto column = panel * blocks_.columns;
    const auto rows = std::min(blocks_.rows, M_ - row);
    const auto columns = std::min(blocks_.columns, N_ - column);
    auto* C = C_ + row * ldc_ + column;
    if constexpr (kInPlace) {
      multiply(row, rows, panel, columns, scratch, C, ldc_);
    } else {
      multiply(row, rows, panel, columns, scratch, sums, columns);
      vectorized<ConvertRows<opmath_t, out_t>>()(
          {sums, columns, columns, C, ldc_}, 0, rows);
    }
  }

  void multiply(
      int64_t row,
      int64_t rows,
      int64_t panel,
      int64_t columns,
      gemm_t* scratch,
      opmath_t* C,
      int64_t ldc) const {
    for (int64_t k = 0; k < terms_; k += blocks_.terms) {
      const auto terms = std::min(blocks_.terms, terms_ - k);
      const auto* A = A_ + row * lda_ + k;
      const bool accumulate = accumulate_ || k > 0;
      const auto* B = block_of_B(panel, k, terms, scratch);
      const auto ldb = packs_ ? width_ : ldb_;
      if constexpr (!std::is_same_v<gemm_t, double>) {
        if (blocks_.by_onednn) {
          const auto product =
              blocks_.in_one_call ? gemm<gemm_t> : gemm_of_rows<gemm_t>;
          product(rows, columns, terms, A, lda_, B, ldb, C, ldc, accumulate);
          continue;
        }
      }
      if constexpr (kPair<gemm_t> == 1) {
        lltm::multiply<gemm_t>(
            rows,
            columns,
            terms,
            A,
            lda_,
            B,
            ldb,
            C,
            ldc,
            accumulate,
            M_,
            packs_);
      }
    }
  }

  const gemm_t*
  block_of_B(int64_t panel, int64_t k, int64_t terms, gemm_t* scratch) const {
    if constexpr (!kAlwaysPacks) {
      if (!packs_) {
        return B_ + k * ldb_ + panel * blocks_.columns;
      }
    }
    if (row_blocks_ > 1) {
      return packed_.data() + (panel * terms_ + k) * width_;
    }
    pack(panel, k, terms, scratch);
    return scratch;
  }

  const int64_t M_;
  const int64_t N_;
  const int64_t K_;
  const gemm_t* const A_;
  const int64_t lda_;
  const scalar_t* const B_;
  const int64_t ldb_;
  out_t* const C_;
  const int64_t ldc_;
  const bool accumulate_;
  const Blocks blocks_;
  const bool packs_ = kAlwaysPacks || blocks_.by_onednn;
  const int64_t terms_ = blocks_.by_onednn ? terms_of<gemm_t>(K_) : K_;
  const int64_t width_ = round_up(blocks_.columns, kVector);
  const int64_t row_blocks_ = at::divup(M_, blocks_.rows);
  const int64_t panels_ = at::divup(N_, blocks_.columns);
  const Scratch<gemm_t> packed_;
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
    if (N == 0) {
      return;
    }
    ProductOnThreads<scalar_t, gemm_t, out_t>(
        d_gates.units,
        N,
        sizes.batch,
        d_gates.columns,
        d_gates.ld_columns,
        B,
        N,
        C,
        sizes.features(),
        accumulate,
        blocks_of_weights<scalar_t, gemm_t>(d_gates.units, N, sizes.batch))
        .run();
  };
  product(old_h, sizes.state_size, d_weights);
  product(input, sizes.input_features, d_weights + sizes.state_size);
}

// result, the gradient of old_h or of input, = d_gates @ the columns of weights
// that it is multiplied by.
template <typename scalar_t, typename gemm_t>
void rows_gradient(
    const CellSizes& sizes,
    const GateGradients<gemm_t>& d_gates,
    const scalar_t* columns_of_weights,
    int64_t columns,
    scalar_t* result) {
  if (columns == 0) {
    return;
  }
  ProductOnThreads<scalar_t, gemm_t, scalar_t>(
      sizes.batch,
      columns,
      d_gates.units,
      d_gates.rows,
      d_gates.ld_rows,
      columns_of_weights,
      sizes.features(),
      result,
      columns,
      false,
      blocks_of_rows<scalar_t, gemm_t>(sizes.batch, columns, d_gates.units))
      .run();
}

// d_bias = or += sums over the batch.
template <typename out_t, typename gemm_t>
struct BiasGradient {
  using opmath_t = at::opmath_type<out_t>;

  const GateGradients<gemm_t>& d_gates;
  out_t* d_bias;
  bool accumulate;

  // Units.
  C10_ALWAYS_INLINE void operator()(int64_t begin, int64_t end) const {
    for (int64_t unit = begin; unit < end; ++unit) {
      const auto before = accumulate ? load(d_bias[unit]) : opmath_t(0);
      const auto* values = d_gates.columns + unit * d_gates.ld_columns;
      store(before + sum(values, d_gates.batch), d_bias[unit]);
    }
  }

  C10_ALWAYS_INLINE opmath_t
  sum(const gemm_t* __restrict__ values, int64_t size) const {
    opmath_t sums[kVector] = {};
    int64_t i = 0;
    for (; i + kVector <= size; i += kVector) {
      for (int64_t lane = 0; lane < kVector; ++lane) {
        sums[lane] += load(values[i + lane]);
      }
    }
    typename Lanes<opmath_t, sizeof(sums)>::type lanes;
    std::memcpy(&lanes, sums, sizeof(lanes));
    auto total = add_lanes<opmath_t, sizeof(sums)>(lanes);
    for (; i < size; ++i) {
      total += load(values[i]);
    }
    return total;
  }
};

template <typename out_t, typename gemm_t>
void bias_gradient(
    const GateGradients<gemm_t>& d_gates,
    out_t* d_bias,
    bool accumulate) {
  at::parallel_for(
      0,
      d_gates.units,
      grain_size(d_gates.batch / kPackedPerNanosecond),
      [&](int64_t begin, int64_t end) {
        vectorized<BiasGradient<out_t, gemm_t>>()(
            {d_gates, d_bias, accumulate}, begin, end);
      });
}

} // namespace lltm
