#pragma once

#include "cuda/recurrence/block.h"

#include <cstdint>

namespace lltm::recurrence {

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
            .input_gate = gates[0],
            .output_gate = gates[args_.state_size],
            .candidate = gates[2 * args_.state_size],
            .cell = args_.cells[at],
            .grad_h = args_.grad_output[at],
            .grad_cell = args_.grad_cells[at]};
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
    // Zeros in the product would not do, because weights may be infinite.
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
  // From here on, everything belongs to the step that runs next.
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
