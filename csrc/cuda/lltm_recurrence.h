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

  // Any byte but 0 is a reset.
  LLTM_INLINE uint8_t reset(int64_t row) const {
    return resets == nullptr ? 0 : resets[row];
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

  // Of so many blocks of columns, those of this warp.
  LLTM_INLINE int column_blocks(int all) const {
    return (all - warp + kWarps - 1) / kWarps;
  }

  // Of the first 16 bytes that a lane reads of a row.
  LLTM_INLINE int first_column() const {
    return kColumns * warp + 8 * quad;
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
    float of_warp[kWarps];
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      const int at = sums_at(first_tile + 2 * i, from, results, result);
      of_warp[from] = sums[at + unit_of_block * kSumStride + row_of_tile];
    }
    // In pairs, which makes a shorter chain.
#pragma unroll
    for (int half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
      for (int j = 0; j < half; ++j) {
        of_warp[j] += of_warp[j + half];
      }
    }
    return of_warp[0];
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

// What a lane reads of a row that other blocks may still be writing: 16 bytes
// of every block of columns of its warp.
template <typename scalar_t>
struct Source {
  const scalar_t* from; // the first of them, or null: zeros
  bool waits;           // until all have arrived
  uint8_t reset;        // if not 0, zeros take the place of what arrives
};

// Up to kColumnBlocks of the blocks of columns of a warp.
class Gathered {
 public:
  // Begins to read blocks first to first + kColumnBlocks, below count.
  template <typename scalar_t, typename Machine>
  LLTM_INLINE void begin(
      const Machine& machine,
      const Source<scalar_t>& source,
      int first,
      int count) {
    count_ = count - first;
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      const bool exists = source.from != nullptr && i < count_;
      words_[i] = exists ? load(machine, source, first + i) : Words{};
    }
  }

  template <typename scalar_t, typename Machine>
  LLTM_INLINE void
  finish(const Machine& machine, const Source<scalar_t>& source, int first) {
    for (int64_t turn = 0; source.waits; ++turn) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < kColumnBlocks; ++i) {
        if (!has_arrived(words_[i])) {
          all = false;
          words_[i] = load(machine, source, first + i);
        }
      }
      if (all) {
        break;
      }
      machine.pause(turn);
    }
#pragma unroll
    for (auto& words : words_) {
      words = source.reset != 0 ? Words{} : words;
    }
    machine.sync_warp(); // mma needs all lanes
  }

  // products[half][result] += the halves of weights[i][result] @ block i, for
  // all that there are: two chains, each half as long.
  template <typename scalar_t, int results, typename Machine>
  LLTM_INLINE void multiply(
      const Machine& machine,
      const uint32_t (&weights)[kColumnBlocks][results][2][4],
      float (&products)[2][results][4]) const {
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      if (i < count_) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int result = 0; result < results; ++result) {
            machine.template mma<scalar_t>(
                products[half][result],
                weights[i][result][half],
                words_[i].word[2 * half],
                words_[i].word[2 * half + 1]);
          }
        }
      }
    }
  }

 private:
  template <typename scalar_t, typename Machine>
  LLTM_INLINE static Words
  load(const Machine& machine, const Source<scalar_t>& source, int i) {
    return machine.load_relaxed(
        reinterpret_cast<const Words*>(source.from + i * kWarps * kColumns));
  }

  Words words_[kColumnBlocks];
  int count_; // the same in all lanes of a warp
};

struct alignas(8) TwoSums {
  float sum[2];
};

// sums: [16 units, kSumStride], of one warp, whose products are in two parts.
LLTM_INLINE void store_sums(
    float* sums,
    const Lane& lane,
    const float (&products)[4],
    const float (&others)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* const to = sums + (lane.group + 8 * half) * kSumStride;
    const int i = 2 * half;
    *reinterpret_cast<TwoSums*>(to + 2 * lane.quad) = {
        products[i] + others[i], products[i + 1] + others[i + 1]};
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

// A block's part of the forward recurrence. What does not need h is done while
// the other blocks compute theirs: addresses, and loads from memory.
template <int tiles, typename scalar_t, typename Machine>
class ForwardBlock {
 public:
  LLTM_INLINE ForwardBlock(
      const Machine& machine,
      const Forward<scalar_t>& args)
      : machine_(machine),
        args_(args),
        part_(machine.block(), machine.thread(), args.state_size),
        column_blocks_(part_.column_blocks(args.state_size / kColumns)) {
    load_weights_for_h();
  }

  // sums: two times kForwardSums, as a step may begin while the last is summed.
  LLTM_INLINE void run(float* sums) {
#pragma unroll
    for (int i = 0; i < part_.kOwned; ++i) {
      if (part_.owned_row(i) < args_.sequence.batch) {
        cell_[i] = args_.cell[at(0, i)];
      }
    }
    prepare(args_.first, args_.row_before);
    for (int32_t turn = 0; turn < args_.count; ++turn) {
      float* const own = sums + turn % 2 * kForwardSums<tiles>;
      multiply(own);
      machine_.sync_block();
      CellForward<float> out[part_.kOwned];
#pragma unroll
      for (int i = 0; i < part_.kOwned; ++i) {
        out[i] = compute(own, i);
      }
#pragma unroll
      for (int i = 0; i < part_.kOwned; ++i) {
        if (part_.owned_row(i) < step_.rows) {
          store(out[i], i);
        }
      }
      if (turn + 1 < args_.count) {
        const auto row_before = step_.first_row;
        prepare(
            args_.sequence.reverse ? step_.before(args_.sequence)
                                   : step_.after(args_.sequence),
            row_before);
      }
    }
#pragma unroll
    for (int i = 0; i < part_.kOwned; ++i) {
      if (part_.owned_row(i) < args_.sequence.batch) {
        args_.cell[at(0, i)] = cell_[i];
      }
    }
  }

 private:
  LLTM_INLINE void load_weights_for_h() {
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      if (i < column_blocks_) {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          load_weights(weights_[i][gate], part_, [&](int row, int column) {
            return args_.weight(
                gate * args_.state_size + part_.first_unit + row,
                kColumns * (part_.warp + i * kWarps) + column);
          });
        }
      }
    }
  }

  // The place of owned element i in a tensor of states, of which the rows
  // begin at first_row.
  LLTM_INLINE int64_t at(int64_t first_row, int i) const {
    return (first_row + part_.owned_row(i)) * args_.state_size + part_.unit;
  }

  LLTM_INLINE scalar_t* gates_of(int i) const {
    const auto row = step_.first_row - args_.gates_row + part_.owned_row(i);
    return args_.gates + row * 3 * args_.state_size + part_.unit;
  }

  // step runs next.
  LLTM_INLINE void prepare(Cursor step, int64_t row_before) {
    step_ = step;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      sources_[tile] = source_of(part_.row_of_lane(tile), row_before);
    }
  }

  LLTM_INLINE Source<scalar_t> source_of(int row, int64_t row_before) const {
    if (row >= step_.rows) {
      return {nullptr, false, 0};
    }
    const bool waits = args_.sequence.reverse
        ? step_.step < args_.sequence.length(row) - 1
        : step_.step > 0;
    const scalar_t* const from = waits
        ? args_.output + (row_before + row) * args_.state_size
        : args_.h0 + int64_t(row) * args_.state_size;
    return {
        from + part_.first_column(), waits, args_.reset(step_.first_row + row)};
  }

  LLTM_INLINE void load_products() {
#pragma unroll
    for (int i = 0; i < part_.kOwned; ++i) {
      if (part_.owned_row(i) < step_.rows) {
        if (part_.unit_of_block == 0) {
          machine_.prefetch(args_.output + at(step_.first_row, i));
        }
        resets_[i] = args_.reset(step_.first_row + part_.owned_row(i));
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          products_[i][gate] = gates_of(i)[gate * args_.state_size];
        }
      }
    }
  }

  // Adds up the products with h of this warp's columns.
  LLTM_INLINE void multiply(float* sums) {
    Gathered gathered[2];
    gathered[0].begin(machine_, sources_[0], 0, column_blocks_);
    load_products();
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      gathered[tile % 2].finish(machine_, sources_[tile], 0);
      if (tile + 1 < tiles) {
        gathered[(tile + 1) % 2].begin(
            machine_, sources_[tile + 1], 0, column_blocks_);
      }
      float products[2][3][4] = {};
      gathered[tile % 2].template multiply<scalar_t>(
          machine_, weights_, products);
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        const int at = part_.sums_at(tile, part_.warp, 3, gate);
        store_sums(sums + at, part_, products[0][gate], products[1][gate]);
      }
    }
  }

  LLTM_INLINE CellForward<float> compute(const float* sums, int i) {
    CellForward<float> out{};
    scalar_t* to = nullptr;
    if (part_.owned_row(i) < step_.rows) {
      float sum[3];
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        sum[gate] = part_.total(sums, i, 3, gate) + products_[i][gate];
      }
      const float old_cell = resets_[i] != 0 ? 0 : cell_[i];
      out = cell_forward<float>(sum[0], sum[1], sum[2], old_cell);
      cell_[i] = out.new_cell;
      to = args_.output + at(step_.first_row, i);
    }
    publish(machine_, to, out.new_h);
    return out;
  }

  LLTM_INLINE void store(const CellForward<float>& out, int i) const {
    args_.cells[at(step_.first_row, i)] = static_cast<scalar_t>(out.new_cell);
    if (args_.write_gates) {
      scalar_t* const gates = gates_of(i);
      gates[0] = static_cast<scalar_t>(out.input_gate);
      gates[args_.state_size] = static_cast<scalar_t>(out.output_gate);
      gates[2 * args_.state_size] = static_cast<scalar_t>(out.candidate);
    }
  }

  const Machine& machine_;
  const Forward<scalar_t>& args_;
  const Part<tiles> part_;
  const int column_blocks_;
  uint32_t weights_[kColumnBlocks][3][2][4] = {};
  float cell_[Part<tiles>::kOwned] = {};
  // Of the step that runs next.
  Cursor step_;
  Source<scalar_t> sources_[tiles];
  scalar_t products_[Part<tiles>::kOwned][3] = {};
  uint8_t resets_[Part<tiles>::kOwned] = {};
};

// shared: two times kForwardSums, as a step may begin while the last is summed.
template <int tiles, typename scalar_t, typename Machine>
LLTM_INLINE void run_forward(
    const Machine& machine,
    const Forward<scalar_t>& args,
    float* shared) {
  ForwardBlock<tiles, scalar_t, Machine>(machine, args).run(shared);
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

// A block's part of the backward recurrence: from the step that ran last to the
// first, and once more for the gradients of the initial state.
template <int tiles, typename scalar_t, typename Machine>
class BackwardBlock {
 public:
  LLTM_INLINE
  BackwardBlock(const Machine& machine, const Backward<scalar_t>& args)
      : machine_(machine),
        args_(args),
        part_(machine.block(), machine.thread(), args.state_size),
        column_blocks_(part_.column_blocks(3 * args.state_size / kColumns)) {
    load_transposed_weights();
  }

  // sums: two times kBackwardSums.
  LLTM_INLINE void run(float* sums) {
    prepare(args_.last, {0, 0, 0});
    for (int32_t turn = 0; turn <= args_.sequence.steps; ++turn) {
      float* const own = sums + turn % 2 * kBackwardSums<tiles>;
      multiply(own);
      machine_.sync_block();
#pragma unroll
      for (int i = 0; i < part_.kOwned; ++i) {
        compute(own, i);
      }
      Cursor next{0, 0, 0}; // the additional turn has no rows
      if (turn + 1 < args_.sequence.steps) {
        next = args_.sequence.reverse ? step_.after(args_.sequence)
                                      : step_.before(args_.sequence);
      }
      prepare(next, step_);
    }
  }

 private:
  struct Saved {
    scalar_t input_gate, output_gate, candidate, cell, grad_h, grad_cell;
  };

  // Their columns are those of all three gates.
  LLTM_INLINE void load_transposed_weights() {
#pragma unroll
    for (int third = 0; third < 3; ++third) {
#pragma unroll
      for (int i = 0; i < kColumnBlocks; ++i) {
        const int block = third * kColumnBlocks + i;
        if (block < column_blocks_) {
          load_weights(weights_[third][i][0], part_, [&](int row, int column) {
            return args_.weight(
                kColumns * (part_.warp + block * kWarps) + column,
                part_.first_unit + row);
          });
        }
      }
    }
  }

  // step runs next, and waits for the d_gates of the one that ran after it.
  LLTM_INLINE void prepare(Cursor step, Cursor after) {
    step_ = step;
    after_ = after;
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      const auto row = part_.row_of_lane(tile);
      const bool ran = row < after.rows;
      const scalar_t* const from = args_.d_gates +
          (after.first_row + row) * 3 * args_.state_size + part_.first_column();
      sources_[tile] = {ran ? from : nullptr, ran, 0};
    }
  }

  LLTM_INLINE void load_saved() {
#pragma unroll
    for (int i = 0; i < part_.kOwned; ++i) {
      const auto own = part_.owned_row(i);
      resets_after_[i] =
          own < after_.rows ? args_.reset(after_.first_row + own) : 0;
      if (own < step_.rows) {
        const auto row = step_.first_row + own;
        const auto at = row * args_.state_size + part_.unit;
        const auto gates_at = row * 3 * args_.state_size + part_.unit;
        const scalar_t* const gates = args_.gates + gates_at;
        saved_[i] = {
            gates[0],
            gates[args_.state_size],
            gates[2 * args_.state_size],
            args_.cells[at],
            args_.grad_output[at],
            args_.grad_cells[at]};
#pragma unroll
        for (int gate = 0; gate < 3 && part_.unit_of_block == 0; ++gate) {
          machine_.prefetch(args_.d_gates + gates_at + gate * args_.state_size);
        }
      }
    }
  }

  // Adds up the products with d_gates of this warp's columns.
  LLTM_INLINE void multiply(float* sums) {
    Gathered gathered[2];
    gathered[0].begin(machine_, sources_[0], 0, column_blocks_);
    load_saved();
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      float products[2][1][4] = {};
#pragma unroll
      for (int third = 0; third < 3; ++third) {
        const int turn = 3 * tile + third;
        gathered[turn % 2].finish(
            machine_, sources_[tile], third * kColumnBlocks);
        const int next = (third + 1) % 3;
        if (turn + 1 < 3 * tiles) {
          gathered[(turn + 1) % 2].begin(
              machine_,
              sources_[(turn + 1) / 3],
              next * kColumnBlocks,
              column_blocks_);
        }
        gathered[turn % 2].template multiply<scalar_t>(
            machine_, weights_[third], products);
      }
      const int at = part_.sums_at(tile, part_.warp, 1, 0);
      store_sums(sums + at, part_, products[0][0], products[1][0]);
    }
  }

  LLTM_INLINE void compute(const float* sums, int i) {
    const auto own = part_.owned_row(i);
    // Not by zeros in the product: weights may be infinite.
    const bool carries = own < after_.rows && resets_after_[i] == 0;
    const float d_h = carries ? part_.total(sums, i, 1, 0) : 0;
    d_cell_[i] = carries ? d_cell_[i] : 0;
    scalar_t* to = nullptr;
    CellBackward<float> out{};
    if (own < step_.rows) {
      to = args_.d_gates + (step_.first_row + own) * 3 * args_.state_size +
          part_.unit;
      const auto& saved = saved_[i];
      out = cell_backward<float>(
          d_h + saved.grad_h,
          d_cell_[i] + saved.grad_cell,
          saved.cell,
          saved.input_gate,
          saved.output_gate,
          saved.candidate);
      d_cell_[i] = out.d_old_cell;
    } else if (own < after_.rows) {
      const auto at = int64_t(own) * args_.state_size + part_.unit;
      args_.d_h0[at] = static_cast<scalar_t>(d_h);
      args_.d_c0[at] = static_cast<scalar_t>(d_cell_[i]);
    }
    const float d_gates[] = {
        out.d_input_gate, out.d_output_gate, out.d_candidate};
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      publish(machine_, to, d_gates[gate]);
      to = to == nullptr ? nullptr : to + args_.state_size;
    }
  }

  const Machine& machine_;
  const Backward<scalar_t>& args_;
  const Part<tiles> part_;
  const int column_blocks_;
  uint32_t weights_[3][kColumnBlocks][1][2][4] = {};
  float d_cell_[Part<tiles>::kOwned] = {};
  // Of the step that runs next.
  Cursor step_;
  Cursor after_;
  Source<scalar_t> sources_[tiles];
  uint8_t resets_after_[Part<tiles>::kOwned] = {};
  Saved saved_[Part<tiles>::kOwned] = {};
};

template <int tiles, typename scalar_t, typename Machine>
LLTM_INLINE void run_backward(
    const Machine& machine,
    const Backward<scalar_t>& args,
    float* shared) {
  BackwardBlock<tiles, scalar_t, Machine>(machine, args).run(shared);
}

} // namespace lltm::recurrence
