#pragma once

#include "ops/gate_math.h"

#include <cstdint>

// The recurrence of a whole sequence in one kernel, for half types.
//
// The blocks of the grid all run at once and stay for the whole sequence. Each
// owns 16 hidden units, and keeps their weights in registers. The blocks pass h
// (backward: d_gates) to one another through the result itself. The result is
// first filled with a sentinel, and each word is written once. A thread that
// needs a word reads it until it is not the sentinel. A conversion to a half
// type never makes the bits of the sentinel: it turns every NaN into the same
// NaN, whose sign or lowest bits are zero. So the data are their own flags, and
// a step needs one barrier of the block.
//
// The products are those of mma.m16n8k16. The 16 rows of its result are hidden
// units, and the 8 columns are rows of the batch. Eight warps divide the
// columns of the weights among them and add up in shared memory.
//
// The kernels know the GPU only through a Machine
// (lltm_recurrence_machine.cuh), so tests run the same source on the host, in
// an emulator.
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
// the lanes of a warp write to different banks.
constexpr int kSumStride = kTileRows + 2;
// So that the arguments of a kernel stay below 4 KiB.
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

  LLTM_INLINE int32_t length(int32_t sequence) const {
    if (sequence >= batch) {
      return 0;
    }
    return packed ? lengths[sequence] : steps;
  }
};

// A step and its rows.
struct Cursor {
  int32_t step;
  int32_t rows;
  int64_t first_row;

  LLTM_INLINE Cursor after(const Sequence& sequence) const {
    Cursor next{step + 1, rows, first_row + rows};
    while (sequence.packed && next.rows > 0 &&
           sequence.length(next.rows - 1) <= next.step) {
      --next.rows;
    }
    return next;
  }

  LLTM_INLINE Cursor before(const Sequence& sequence) const {
    Cursor next{step - 1, rows, first_row};
    while (sequence.packed && next.rows < sequence.batch &&
           sequence.length(next.rows) > next.step) {
      ++next.rows;
    }
    next.first_row -= next.rows;
    return next;
  }
};

// What both directions take: contiguous tensors, but for weights. state_size is
// a multiple of 32, at most kMostUnits.
template <typename scalar_t>
struct Arguments {
  Sequence sequence;
  int32_t state_size;
  const scalar_t* weights; // [3 * state_size, state_size]
  int64_t weights_strides[2];
  const uint8_t* resets; // [rows], or null

  LLTM_INLINE scalar_t weight(int64_t gate_unit, int64_t unit) const {
    return weights[gate_unit * weights_strides[0] + unit * weights_strides[1]];
  }

  LLTM_INLINE bool is_reset(int64_t row) const {
    return resets != nullptr && resets[row] != 0;
  }
};

// What a lane holds of the operands of mma: its group, in the words of the PTX
// ISA, and its place there.
struct Lane {
  int warp;
  int group;
  int quad;

  LLTM_INLINE explicit Lane(int thread)
      : warp(thread / 32), group(thread % 32 / 4), quad(thread % 4) {}
};

// What a thread does: as a lane, and for the elements of the state that it
// owns, of its unit and one row of every second tile.
template <int tiles>
struct Part : Lane {
  static constexpr int kOwned = (tiles + 1) / 2;

  int unit_of_block;
  int row_of_tile;
  int first_tile;
  int first_unit;
  int first_row;
  int unit;

  LLTM_INLINE Part(int block, int thread, int state_size) : Lane(thread) {
    const int blocks = state_size / kUnits;
    unit_of_block = thread % kUnits;
    row_of_tile = thread / kUnits % kTileRows;
    first_tile = thread / (kUnits * kTileRows);
    first_unit = block % blocks * kUnits;
    first_row = block / blocks * tiles * kTileRows;
    unit = first_unit + unit_of_block;
  }

  // All rows here are rows of the batch.
  LLTM_INLINE int row_of_lane(int tile) const {
    return first_row + tile * kTileRows + group;
  }

  // With a single tile, half of the threads own nothing.
  LLTM_INLINE int owned_row(int i) const {
    constexpr int kNone = INT32_MAX;
    const int tile = first_tile + 2 * i;
    return tile < tiles ? first_row + tile * kTileRows + row_of_tile : kNone;
  }

  // The place of a warp's partial sums for one of so many results of mma.
  LLTM_INLINE static int sums_at(int tile, int warp, int results, int result) {
    return ((tile * kWarps + warp) * results + result) * kUnits * kSumStride;
  }

  // The sum over all warps for element i of those that the thread owns.
  LLTM_INLINE float total(const float* sums, int i, int results, int result)
      const {
    float total = 0;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      const int at = sums_at(first_tile + 2 * i, from, results, result);
      total += sums[at + unit_of_block * kSumStride + row_of_tile];
    }
    return total;
  }
};

template <typename scalar_t>
LLTM_INLINE uint32_t pack(scalar_t low, scalar_t high) {
  return low.x | static_cast<uint32_t>(high.x) << 16;
}

// Loads the weights of two mma: at(row, column) for 16 rows and 32 columns. A
// lane takes eight columns that lie together, so it needs 16 bytes of a row of
// h for both mma. This changes the order of a sum and nothing else.
template <typename At>
LLTM_INLINE void
load_weights(uint32_t (&weights)[2][4], const Lane& lane, const At& at) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane.group + i % 2 * 8;
      const int column = 8 * lane.quad + 4 * half + i / 2 * 2;
      weights[half][i] = pack(at(row, column), at(row, column + 1));
    }
  }
}

LLTM_INLINE bool has_arrived(const Words& words) {
  return words.word[0] != kSentinel && words.word[1] != kSentinel &&
      words.word[2] != kSentinel && words.word[3] != kSentinel;
}

// Reads what a lane needs of a row, from blocks of columns first,
// first + kWarps and so on. Words beyond end are zero, and all are if row is
// null. If waits is true, it reads until all words have arrived.
template <typename scalar_t, typename Machine>
LLTM_INLINE void gather(
    const Machine& machine,
    Words (&words)[kColumnBlocks],
    const scalar_t* row,
    int first,
    int end,
    bool waits) {
  const auto load = [&](int i) {
    return machine.load_relaxed(
        reinterpret_cast<const Words*>(row + kColumns * (first + i * kWarps)));
  };
#pragma unroll
  for (int i = 0; i < kColumnBlocks; ++i) {
    const bool exists = row != nullptr && first + i * kWarps < end;
    words[i] = exists ? load(i) : Words{};
  }
  for (int64_t turn = 0; waits; ++turn) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      if (!has_arrived(words[i])) {
        all = false;
        words[i] = load(i);
      }
    }
    if (all) {
      break;
    }
    machine.pause(turn);
  }
  machine.sync_warp(); // mma needs all lanes
}

struct alignas(8) TwoSums {
  float sum[2];
};

// sums: [16 units, kSumStride], of one warp.
LLTM_INLINE void
store_sums(float* sums, const Lane& lane, const float (&products)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const to = sums + (lane.group + 8 * half) * kSumStride;
    *reinterpret_cast<TwoSums*>(to + 2 * lane.quad) = {
        products[2 * half], products[2 * half + 1]};
  }
}

// Publishes two units as one word, from the lane of the first. All lanes have
// to call it; those that publish nothing, with null.
template <typename scalar_t, typename Machine>
LLTM_INLINE void publish(const Machine& machine, scalar_t* to, float value) {
  const auto own = static_cast<scalar_t>(value);
  scalar_t other;
  other.x = machine.shuffle_xor(own.x, 1);
  if (to != nullptr && machine.thread() % 2 == 0) {
    machine.store_relaxed(reinterpret_cast<uint32_t*>(to), pack(own, other));
  }
}

template <typename scalar_t>
struct Forward : Arguments<scalar_t> {
  // This launch runs count steps, beginning at first. The row before is the
  // first one of the step that ran before it.
  int32_t count;
  Cursor first;
  int64_t row_before;
  const scalar_t* h0; // [batch, state_size], aligned to 16 bytes
  float*
      cell; // [batch, state_size]: before the first step, then after the last
  // The products with input, plus bias, [rows, 3 * state_size], from row
  // gates_row on. The activated gates replace them if write_gates.
  scalar_t* gates;
  int64_t gates_row;
  bool write_gates;
  scalar_t* output; // [rows, state_size], aligned too, filled with 0xff
  scalar_t* cells;  // [rows, state_size]
};

template <int tiles>
constexpr int kForwardSums = tiles * kWarps * 3 * kUnits * kSumStride;

// shared: two times kForwardSums, as a step may begin while the last is summed.
template <int tiles, typename scalar_t, typename Machine>
LLTM_INLINE void run_forward(
    const Machine& machine,
    const Forward<scalar_t>& args,
    float* shared) {
  const auto& sequence = args.sequence;
  const auto state_size = args.state_size;
  const int column_blocks = state_size / kColumns;
  const Part<tiles> part(machine.block(), machine.thread(), state_size);
  uint32_t weights[kColumnBlocks][3][2][4] = {};
#pragma unroll
  for (int i = 0; i < kColumnBlocks; ++i) {
    const int block = part.warp + i * kWarps;
    if (block < column_blocks) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        load_weights(weights[i][gate], part, [&](int row, int column) {
          return args.weight(
              gate * state_size + part.first_unit + row,
              kColumns * block + column);
        });
      }
    }
  }
  float cell[part.kOwned] = {};
#pragma unroll
  for (int i = 0; i < part.kOwned; ++i) {
    if (part.owned_row(i) < sequence.batch) {
      cell[i] = args.cell[int64_t(part.owned_row(i)) * state_size + part.unit];
    }
  }
  Cursor cursor = args.first;
  int64_t row_before = args.row_before;
  for (int32_t turn = 0; turn < args.count; ++turn) {
    const auto gates_of = [&](int i) {
      const auto row = cursor.first_row - args.gates_row + part.owned_row(i);
      return args.gates + row * 3 * state_size + part.unit;
    };
    scalar_t products[part.kOwned][3];
#pragma unroll
    for (int i = 0; i < part.kOwned; ++i) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        if (part.owned_row(i) < cursor.rows) {
          products[i][gate] = gates_of(i)[gate * state_size];
        }
      }
    }
    float* const sums = shared + turn % 2 * kForwardSums<tiles>;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const auto own = part.row_of_lane(tile);
      const scalar_t* from = nullptr;
      bool waits = false;
      bool is_reset = false;
      if (own < cursor.rows) {
        waits = sequence.reverse ? cursor.step < sequence.length(own) - 1
                                 : cursor.step > 0;
        from = waits ? args.output + (row_before + own) * state_size
                     : args.h0 + int64_t(own) * state_size;
        from += 8 * part.quad;
        is_reset = args.is_reset(cursor.first_row + own);
      }
      Words words[kColumnBlocks];
      gather(machine, words, from, part.warp, column_blocks, waits);
#pragma unroll
      for (auto& each : words) {
        each = is_reset ? Words{} : each;
      }
      float products_with_h[3][4] = {};
#pragma unroll
      for (int i = 0; i < kColumnBlocks; ++i) {
        if (part.warp + i * kWarps < column_blocks) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
              machine.template mma<scalar_t>(
                  products_with_h[gate],
                  weights[i][gate][half],
                  words[i].word[2 * half],
                  words[i].word[2 * half + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        const int at = part.sums_at(tile, part.warp, 3, gate);
        store_sums(sums + at, part, products_with_h[gate]);
      }
    }
    machine.sync_block();
#pragma unroll
    for (int i = 0; i < part.kOwned; ++i) {
      scalar_t* to = nullptr;
      float new_h = 0;
      if (part.owned_row(i) < cursor.rows) {
        const auto row = cursor.first_row + part.owned_row(i);
        scalar_t* const gates = gates_of(i);
        float sum[3];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          sum[gate] = part.total(sums, i, 3, gate) + products[i][gate];
        }
        const float old_cell = args.is_reset(row) ? 0 : cell[i];
        const auto out = cell_forward<float>(sum[0], sum[1], sum[2], old_cell);
        cell[i] = out.new_cell;
        new_h = out.new_h;
        to = args.output + row * state_size + part.unit;
        args.cells[row * state_size + part.unit] =
            static_cast<scalar_t>(cell[i]);
        if (args.write_gates) {
          gates[0] = static_cast<scalar_t>(out.input_gate);
          gates[state_size] = static_cast<scalar_t>(out.output_gate);
          gates[2 * state_size] = static_cast<scalar_t>(out.candidate);
        }
      }
      publish(machine, to, new_h);
    }
    row_before = cursor.first_row;
    cursor =
        sequence.reverse ? cursor.before(sequence) : cursor.after(sequence);
  }
#pragma unroll
  for (int i = 0; i < part.kOwned; ++i) {
    if (part.owned_row(i) < sequence.batch) {
      args.cell[int64_t(part.owned_row(i)) * state_size + part.unit] = cell[i];
    }
  }
}

template <typename scalar_t>
struct Backward : Arguments<scalar_t> {
  Cursor last;                 // the step that ran last
  const scalar_t* gates;       // [rows, 3 * state_size]
  const scalar_t* cells;       // [rows, state_size]
  const scalar_t* grad_output; // [rows, state_size]
  const scalar_t* grad_cells;  // [rows, state_size]
  // [rows, 3 * state_size], aligned to 16 bytes, filled with 0xff
  scalar_t* d_gates;
  scalar_t* d_h0; // [batch, state_size]
  scalar_t* d_c0; // [batch, state_size]
};

template <int tiles>
constexpr int kBackwardSums = tiles * kWarps * kUnits * kSumStride;

// From the step that ran last to the first, and once more for the gradients of
// the initial state.
template <int tiles, typename scalar_t, typename Machine>
LLTM_INLINE void run_backward(
    const Machine& machine,
    const Backward<scalar_t>& args,
    float* shared) {
  const auto& sequence = args.sequence;
  const auto state_size = args.state_size;
  // The columns of the transposed weights are those of all three gates.
  const int column_blocks = 3 * state_size / kColumns;
  const Part<tiles> part(machine.block(), machine.thread(), state_size);
  uint32_t weights[3][kColumnBlocks][2][4] = {};
#pragma unroll
  for (int third = 0; third < 3; ++third) {
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      const int block = part.warp + (third * kColumnBlocks + i) * kWarps;
      if (block < column_blocks) {
        load_weights(weights[third][i], part, [&](int row, int column) {
          return args.weight(kColumns * block + column, part.first_unit + row);
        });
      }
    }
  }
  float d_cell[part.kOwned] = {};
  Cursor cursor = args.last;
  int64_t row_after = 0;
  int32_t rows_after = 0;
  for (int32_t turn = 0; turn <= sequence.steps; ++turn) {
    // The additional turn has no rows.
    const int32_t rows = turn < sequence.steps ? cursor.rows : 0;
    struct Saved {
      scalar_t input_gate, output_gate, candidate, cell, grad_h, grad_cell;
    } saved[part.kOwned];
    bool carries[part.kOwned]; // gradients, from the step after
#pragma unroll
    for (int i = 0; i < part.kOwned; ++i) {
      const auto own = part.owned_row(i);
      carries[i] = own < rows_after && !args.is_reset(row_after + own);
      if (own < rows) {
        const auto row = cursor.first_row + own;
        const auto at = row * state_size + part.unit;
        const scalar_t* const gates =
            args.gates + row * 3 * state_size + part.unit;
        saved[i] = {
            gates[0],
            gates[state_size],
            gates[2 * state_size],
            args.cells[at],
            args.grad_output[at],
            args.grad_cells[at]};
      }
    }
    float* const sums = shared + turn % 2 * kBackwardSums<tiles>;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const auto own = part.row_of_lane(tile);
      const bool ran = own < rows_after;
      const scalar_t* const from = ran
          ? args.d_gates + (row_after + own) * 3 * state_size + 8 * part.quad
          : nullptr;
      float products[2][4] = {};
#pragma unroll
      for (int third = 0; third < 3; ++third) {
        const int first = part.warp + third * kColumnBlocks * kWarps;
        Words words[kColumnBlocks];
        gather(machine, words, from, first, column_blocks, ran);
#pragma unroll
        for (int i = 0; i < kColumnBlocks; ++i) {
          if (first + i * kWarps < column_blocks) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              machine.template mma<scalar_t>(
                  products[half],
                  weights[third][i][half],
                  words[i].word[2 * half],
                  words[i].word[2 * half + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        products[0][i] += products[1][i];
      }
      const int at = part.sums_at(tile, part.warp, 1, 0);
      store_sums(sums + at, part, products[0]);
    }
    machine.sync_block();
#pragma unroll
    for (int i = 0; i < part.kOwned; ++i) {
      const auto own = part.owned_row(i);
      // Not by zeros in the product: weights may be infinite.
      const float d_h = carries[i] ? part.total(sums, i, 1, 0) : 0;
      d_cell[i] = carries[i] ? d_cell[i] : 0;
      scalar_t* to = nullptr;
      CellBackward<float> out{};
      if (own < rows) {
        to = args.d_gates + (cursor.first_row + own) * 3 * state_size +
            part.unit;
        const auto& step = saved[i];
        out = cell_backward<float>(
            d_h + step.grad_h,
            d_cell[i] + step.grad_cell,
            step.cell,
            step.input_gate,
            step.output_gate,
            step.candidate);
        d_cell[i] = out.d_old_cell;
      } else if (own < rows_after) {
        const auto at = int64_t(own) * state_size + part.unit;
        args.d_h0[at] = static_cast<scalar_t>(d_h);
        args.d_c0[at] = static_cast<scalar_t>(d_cell[i]);
      }
      const float d_gates[] = {
          out.d_input_gate, out.d_output_gate, out.d_candidate};
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        publish(machine, to, d_gates[gate]);
        to = to == nullptr ? nullptr : to + state_size;
      }
    }
    row_after = cursor.first_row;
    rows_after = rows;
    cursor =
        sequence.reverse ? cursor.after(sequence) : cursor.before(sequence);
  }
}

} // namespace lltm::recurrence
