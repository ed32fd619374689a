#pragma once

#include "ops/gate_math.h"

#include <cstdint>

// The recurrence of a whole sequence in one kernel, for half types.
//
// The blocks of the grid all run at once and stay for the whole sequence. Each
// keeps the weights of its units in registers. The blocks pass h (backward:
// d_preactivations) to one another through the result itself. The result is
// first filled with a sentinel, and each word is written once. A thread that
// needs a word reads it until it is not the sentinel. A conversion to a half
// type never makes the bits of the sentinel: it turns every NaN into the same
// NaN, whose sign or lowest bits are zero. So the data are their own flags, and
// a step needs one barrier of the block.
//
// Who owns what, with H units, 2 tiles in a block, and C = H (backward: 3 * H):
//
//   states        16 units     16 units
//   2 tiles     | block 0    | block 1      | ...    a tile is 8 rows of
//   2 tiles     | block H/16 | block H/16+1 | ...    the batch
//
//   product       weights, 16 units x C  @  h, C x 8 rows  =  sums, 16 x 8
//   columns     | 0-31   | 32-63  | ... | 224-255 | 256-287 | ...
//               | warp 0 | warp 1 | ... | warp 7  | warp 0  | ...
//   lane          units g, g + 8            row g             units g, g + 8
//                 columns 8q to 8q + 7 of each 32             rows 2q, 2q + 1
//                 where g = lane / 4, q = lane % 4, by mma.m16n8k16
//
//   cell          the sums of all warps, added up
//   thread        unit thread % 16, row thread / 16 % 8 of every second tile
//
// To read: this file, then forward.h with block.h, then launch.h and the .cu.
//
// The kernels know the GPU only through a Machine (gpu_machine.cuh), so tests
// run the same source on the host, in an emulator.
namespace lltm::recurrence {

constexpr int kUnits = 16;   // of a block
constexpr int kTileRows = 8; // of the batch
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
// Two mma take 32 columns of the weights. A warp holds up to four such blocks
// of columns of each gate.
constexpr int kColumns = 32;
constexpr int kColumnBlocks = 4;
constexpr int kMostUnits = kWarps * kColumnBlocks * kColumns;
// Partial sums, rows by columns of the result of mma: two more than 8, so that
// the lanes of a warp read from different banks.
constexpr int kSumStride = kTileRows + 2;
// So few that the arguments of a kernel stay below 4 KiB.
constexpr int kMostPackedBatch = 896;
constexpr uint32_t kSentinel = 0xffffffffu;

// The blocks of a grid, each for 16 units and so many tiles of the batch.
constexpr int64_t
grid_blocks(int64_t batch, int64_t state_size, int64_t tiles) {
  const int64_t rows = tiles * kTileRows;
  return (batch + rows - 1) / rows * (state_size / kUnits);
}

struct alignas(16) Words {
  uint32_t word[4];
};

// The rows of all steps lie one step after the other: [rows, ...]. Sequence b
// runs at the steps before its length. The longest sequences come first, so
// those that run at a step are the first rows of the batch.
struct Sequence {
  int32_t steps;
  int32_t batch;
  bool reverse;
  bool packed;
  int32_t lengths[kMostPackedBatch]; // only if packed
};

// A step and its rows.
struct Cursor {
  int32_t step;
  int32_t rows;
  int64_t first_row;

  LLTM_INLINE Cursor after(const Sequence& sequence) const {
    Cursor next{step + 1, rows, first_row + rows};
    while (sequence.packed && next.rows > 0 &&
           sequence.lengths[next.rows - 1] <= next.step) {
      --next.rows;
    }
    return next;
  }

  LLTM_INLINE Cursor before(const Sequence& sequence) const {
    Cursor next{step - 1, rows, first_row};
    while (sequence.packed && next.rows < sequence.batch &&
           sequence.lengths[next.rows] > next.step) {
      ++next.rows;
    }
    next.first_row -= next.rows;
    return next;
  }
};

// The arguments of both directions. Tensors are contiguous, except for weights.
// state_size is a multiple of 32, at most kMostUnits.
template <typename scalar_t>
struct Arguments {
  CellMath<float> math;
  Sequence sequence;
  int32_t state_size;
  const scalar_t* weights; // [3 * state_size, state_size]
  int64_t weights_strides[2];
  const uint8_t* resets; // [rows], or null; any byte but 0 is one

  LLTM_INLINE scalar_t weight(int64_t gate_unit, int64_t unit) const {
    return weights[gate_unit * weights_strides[0] + unit * weights_strides[1]];
  }
};

template <typename scalar_t>
struct Forward : Arguments<scalar_t> {
  static constexpr int kSums = 3 * kWarps * kUnits * kSumStride; // of a tile
  // This launch runs launch_steps steps, from first_step on. before is the step
  // that ran before them, without rows if none did.
  int32_t launch_steps;
  Cursor first_step;
  Cursor before;
  const scalar_t* h0; // [batch, state_size], aligned to 16 bytes
  // [batch, state_size]: before the first step, then after the last
  float* cell;
  // Those with input, plus bias, [rows, 3 * state_size], from row products_row
  // on. The activated gates replace them if write_gates.
  scalar_t* products;
  int64_t products_row;
  bool write_gates;
  scalar_t* output; // [rows, state_size], aligned too, filled with 0xff
  scalar_t* cells;  // [rows, state_size]
};

template <typename scalar_t>
struct Backward : Arguments<scalar_t> {
  static constexpr int kSums = kWarps * kUnits * kSumStride; // of a tile
  Cursor last;                 // the step that ran last
  const scalar_t* gates;       // [rows, 3 * state_size]
  const scalar_t* cells;       // [rows, state_size]
  const scalar_t* grad_output; // [rows, state_size]
  const scalar_t* grad_cells;  // [rows, state_size], or null: zeros
  const scalar_t* grad_h_n;    // [batch, state_size], or null: zeros
  const scalar_t* grad_c_n;    // [batch, state_size], or null: zeros
  // [rows, 3 * state_size], aligned to 16 bytes, filled with 0xff
  scalar_t* d_preactivations;
  scalar_t* d_h0; // [batch, state_size]
  scalar_t* d_c0; // [batch, state_size]
};

} // namespace lltm::recurrence
