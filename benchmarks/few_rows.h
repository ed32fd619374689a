#pragma once

#include "cuda/recurrence/block.h"

#include <algorithm>
#include <cstdint>

// A step of the cell in one kernel, for up to 16 rows of a half type. lltm_ops
// runs two products and a kernel. No GPU has judged this variant, so it is no
// part of lltm_ops; few_rows.py compares the two.
//
//   block         8 units, so that 1024 units are 128 blocks
//   product       [old_h, input], 16 rows x C  @  weights.T, C x 8 units
//   columns       as in the recurrence: 32 for warp 0, 32 for warp 1, ...
//   cell          row thread % 16, unit thread / 16
//
// Such a step takes the latency of its loads and the bytes of its weights. So a
// warp begins all its loads at once, and no block reads another's weights.
//
// Compared with the recurrence, rows and units have changed places in mma: a
// block then has fewer units, and more blocks share the weights.
namespace lltm::few_rows {

using recurrence::kColumns;
using recurrence::kThreads;
using recurrence::kWarps;
using recurrence::Words;

constexpr int kRows = 16; // of the batch, and of the first operand of mma
constexpr int kUnits = 8; // of a block, and columns of the second
// A warp reads so many blocks of columns at once: all warps, 2048 columns.
constexpr int kInFlight = 8;
constexpr int kSums = kWarps * 3 * kRows * recurrence::kSumStride;

// Tensors are contiguous, and aligned to 16 bytes.
template <typename scalar_t>
struct Cell {
  int32_t batch;          // 1 to kRows
  int32_t input_features; // a multiple of kColumns
  int32_t state_size;     // likewise
  const scalar_t* input;
  const scalar_t* weights;
  const scalar_t* bias;
  const scalar_t* old_h;
  const scalar_t* old_cell;
  scalar_t* new_h;
  scalar_t* new_cell;
  scalar_t* gates; // or null
};

template <typename scalar_t, typename Machine>
class Block {
 public:
  LLTM_INLINE Block(const Machine& machine, const Cell<scalar_t>& cell)
      : machine_(machine),
        cell_(cell),
        part_(machine.block(), machine.thread(), cell.state_size),
        row_(part_.unit_of_block),
        unit_(machine.block() * kUnits + part_.row_of_tile),
        columns_(cell.state_size + cell.input_features) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const int unit = machine.block() * kUnits + part_.group;
      weights_[gate] =
          cell.weights + int64_t(gate * cell.state_size + unit) * columns_;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Nobody reads the results of rows beyond the batch.
      const int64_t row = std::min(part_.group + 8 * i, cell.batch - 1);
      h_[i] = cell.old_h + row * cell.state_size;
      input_[i] = cell.input + row * cell.input_features;
    }
  }

  // sums: kSums.
  LLTM_INLINE void run(float* sums) const {
    const bool owns = machine_.thread() < kRows * kUnits && row_ < cell_.batch;
    scalar_t bias[3] = {}, old_cell = 0;
    if (owns) {
      old_cell = cell_.old_cell[at(1)];
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        bias[gate] = cell_.bias[gate * cell_.state_size + unit_];
      }
    }
    machine_.sync_warp(); // mma needs all lanes
    float products[2][3][4] = {};
    for (int first = part_.warp * kColumns; first < columns_;
         first += kInFlight * kStride) {
      multiply(products, first);
    }
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      store_sums(
          sums + part_.sums_at(0, part_.warp, 3, gate),
          part_,
          products[0][gate],
          products[1][gate]);
    }
    machine_.sync_block();
    if (owns) {
      compute(sums, bias, old_cell);
    }
  }

 private:
  static constexpr int kStride = kWarps * kColumns;

  // The lane's 16 bytes of a block of columns. Past the first cache, because
  // weights are read once.
  LLTM_INLINE Words load(const scalar_t* columns) const {
    return machine_.load_relaxed(
        reinterpret_cast<const Words*>(columns + 8 * part_.quad));
  }

  // products[half of a block][gate] += those of columns first to first + 31,
  // and of the blocks after these that are the warp's.
  LLTM_INLINE void multiply(float (&products)[2][3][4], int first) const {
    Words weights[kInFlight][3], features[kInFlight][2];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int column = first + i * kStride;
      if (column < columns_) {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          weights[i][gate] = load(weights_[gate] + column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int column = first + i * kStride;
      if (column < columns_) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool of_h = column < cell_.state_size;
          features[i][j] = load(
              (of_h ? h_[j] : input_[j]) + column -
              (of_h ? 0 : cell_.state_size));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kStride < columns_) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto* const low = features[i][0].word + 2 * half;
          const auto* const high = features[i][1].word + 2 * half;
#pragma unroll
          for (int gate = 0; gate < 3; ++gate) {
            const auto* const weight = weights[i][gate].word + 2 * half;
            machine_.template mma<scalar_t>(
                products[half][gate],
                {low[0], high[0], low[1], high[1]},
                weight[0],
                weight[1]);
          }
        }
      }
    }
  }

  // The place of the thread's row and unit in rows of so many states.
  LLTM_INLINE int64_t at(int states) const {
    return int64_t(row_) * states * cell_.state_size + unit_;
  }

  LLTM_INLINE void compute(
      const float* sums,
      const scalar_t (&bias)[3],
      scalar_t old_cell) const {
    float sum[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      sum[gate] = part_.total(sums, 0, 3, gate) + bias[gate];
    }
    const auto out = cell_forward<float>(sum[0], sum[1], sum[2], old_cell);
    cell_.new_h[at(1)] = static_cast<scalar_t>(out.new_h);
    cell_.new_cell[at(1)] = static_cast<scalar_t>(out.new_cell);
    if (cell_.gates != nullptr) {
      scalar_t* const gates = cell_.gates + at(3);
      gates[0] = static_cast<scalar_t>(out.input_gate);
      gates[cell_.state_size] = static_cast<scalar_t>(out.output_gate);
      gates[2 * cell_.state_size] = static_cast<scalar_t>(out.candidate);
    }
  }

  const Machine& machine_;
  const Cell<scalar_t>& cell_;
  // Its units are rows here, and its rows units.
  const recurrence::Part<1> part_;
  const int row_; // that the thread owns, and its unit
  const int unit_;
  const int columns_; // of weights
  // Rows that the lane reads.
  const scalar_t* weights_[3];
  const scalar_t* h_[2];
  const scalar_t* input_[2];
};

} // namespace lltm::few_rows
