#pragma once

#include "cuda/recurrence/block.h"
#include "ops/gate_math.h"

#include <cstdint>

namespace lltm::recurrence {

// forward.h says why. 500 is within 4 % of the best at each size.
constexpr uint32_t kBackwardClocksToLook = 500;

// A block's part of the backward recurrence: from the step that ran last to the
// first, and once more for the gradients of the initial state.
template <int tiles, typename scalar_t, typename Machine>
class BackwardBlock {
 public:
  LLTM_INLINE
  BackwardBlock(const Machine& machine, const Backward<scalar_t>& args)
      : machine_(machine),
        args_(args),
        work_(machine.block(), machine.thread(), args.state_size),
        column_blocks_(work_.column_blocks(3 * args.state_size / kColumns)) {
    load_transposed_weights();
  }

  // sums: 2 * tiles * kSums.
  LLTM_INLINE void run(float* sums) {
    after_ = {0, 0, 0};
    step_ = args_.last;
    next_ = step_after(step_, 0);
#pragma unroll
    for (int i = 0; i < work_.kOwned; ++i) {
      load_saved(step_, after_, i);
    }
    for (int32_t turn = 0; turn <= args_.sequence.steps; ++turn) {
      float* const own = sums + turn % 2 * (tiles * args_.kSums);
      multiply(own, turn);
      machine_.sync_block();
#pragma unroll
      for (int i = 0; i < work_.kOwned; ++i) {
        compute(own, i);
      }
      published_at_ = machine_.clock();
#pragma unroll
      for (int i = 0; i < work_.kOwned; ++i) {
        const auto own = work_.owned_row(i);
        if (args_.resets != nullptr && own < step_.rows) {
          resets_after_[i] = args_.resets[step_.first_row + own];
        }
        load_saved(next_, step_, i);
      }
      after_ = step_;
      step_ = next_;
      next_ = ahead_;
    }
  }

 private:
  struct Saved {
    scalar_t input_gate, output_gate, candidate, cell, grad_h, grad_cell;
  };

  // What needs no d_h, made before d_h arrives.
  struct Factors {
    float input_gate, output_gate, candidate, tanh_cell, grad_h, grad_cell;
  };

  // Their columns are those of all three gates.
  LLTM_INLINE void load_transposed_weights() {
#pragma unroll
    for (int third = 0; third < 3; ++third) {
#pragma unroll
      for (int i = 0; i < kColumnBlocks; ++i) {
        const int block = third * kColumnBlocks + i;
        if (block < column_blocks_) {
          load_weights(weights_[third][i][0], work_, [&](int row, int column) {
            return args_.weight(
                kColumns * (work_.warp + block * kWarps) + column,
                work_.first_unit + row);
          });
        }
      }
    }
  }

  // The step that runs after that of a turn, or one without rows. The turn
  // after the last step has no rows.
  LLTM_INLINE Cursor step_after(Cursor step, int32_t turn) const {
    if (turn + 1 >= args_.sequence.steps) {
      return {0, 0, 0};
    }
    return args_.sequence.reverse ? step.after(args_.sequence)
                                  : step.before(args_.sequence);
  }

  LLTM_INLINE Source<scalar_t> source_of(int tile) const {
    const auto row = work_.row_of_lane(tile);
    const bool ran = row < after_.rows;
    const scalar_t* const from = args_.d_preactivations +
        (after_.first_row + row) * 3 * args_.state_size + work_.first_column();
    return {ran ? from : nullptr, ran};
  }

  // The row of owned element i begins here in a tensor of states.
  LLTM_INLINE int64_t row_at(Cursor step, int i) const {
    return (step.first_row + work_.owned_row(i)) * args_.state_size;
  }

  LLTM_INLINE void prefetch(Cursor step) const {
#pragma unroll
    for (int i = 0; i < work_.kOwned; ++i) {
      if (work_.owned_row(i) < step.rows && work_.unit_of_block == 0) {
        const auto row = row_at(step, i);
        machine_.prefetch(args_.cells + row + work_.unit);
        machine_.prefetch(args_.grad_output + row + work_.unit);
        if (args_.grad_cells != nullptr) {
          machine_.prefetch(args_.grad_cells + row + work_.unit);
        }
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          const auto column = gate * args_.state_size + work_.unit;
          machine_.prefetch(args_.gates + 3 * row + column);
          machine_.prefetch(args_.d_preactivations + 3 * row + column);
        }
      }
    }
  }

  // after: the step that runs before it.
  LLTM_INLINE void load_saved(Cursor step, Cursor after, int i) {
    const auto own = work_.owned_row(i);
    if (own < step.rows) {
      const auto row = row_at(step, i);
      const scalar_t* const gates = args_.gates + 3 * row + work_.unit;
      saved_[i] = {
          .input_gate = gates[0],
          .output_gate = gates[args_.state_size],
          .candidate = gates[2 * args_.state_size],
          .cell = args_.cells[row + work_.unit],
          .grad_h = args_.grad_output[row + work_.unit],
          .grad_cell = args_.grad_cells == nullptr
              ? scalar_t(0)
              : args_.grad_cells[row + work_.unit]};
      if (own >= after.rows) {
        add_gradients_of_last_state(int64_t(own) * args_.state_size, i);
      }
    }
  }

  // They are added where the step that made it has its own, and rounded as a
  // sum in PyTorch is.
  LLTM_INLINE void add_gradients_of_last_state(int64_t row, int i) {
    if (args_.grad_h_n != nullptr) {
      saved_[i].grad_h = saved_[i].grad_h + args_.grad_h_n[row + work_.unit];
    }
    if (args_.grad_c_n != nullptr) {
      saved_[i].grad_cell =
          saved_[i].grad_cell + args_.grad_c_n[row + work_.unit];
    }
  }

  // Adds up the products with d_preactivations of this warp's columns.
  LLTM_INLINE void multiply(float* sums, int32_t turn) {
    Source<scalar_t> sources[tiles];
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      sources[tile] = source_of(tile);
    }
    machine_.wait_since(published_at_, kBackwardClocksToLook);
    // With several tiles there are no registers for more.
    constexpr int kInFlight = tiles == 1 ? 3 : 2;
    Gathered gathered[kInFlight];
#pragma unroll
    for (int third = 0; third < kInFlight; ++third) {
      gathered[third].begin(
          machine_, sources[0], third * kColumnBlocks, column_blocks_);
    }
    // While the words are on their way.
    ahead_ = step_after(next_, turn + 1);
    prefetch(ahead_);
#pragma unroll
    for (int i = 0; i < work_.kOwned; ++i) {
      const auto& saved = saved_[i];
      factors_[i] = {
          .input_gate = saved.input_gate,
          .output_gate = saved.output_gate,
          .candidate = saved.candidate,
          .tanh_cell = lltm::tanh(static_cast<float>(saved.cell)),
          .grad_h = saved.grad_h,
          .grad_cell = saved.grad_cell};
    }
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      float products[4][1][4] = {};
#pragma unroll
      for (int third = 0; third < 3; ++third) {
        const int now = 3 * tile + third;
        auto& words = gathered[now % kInFlight];
        words.finish(machine_, sources[tile], third * kColumnBlocks);
        words.template multiply<scalar_t>(machine_, weights_[third], products);
        const int later = now + kInFlight;
        if (later < 3 * tiles) {
          words.begin(
              machine_,
              sources[later / 3],
              later % 3 * kColumnBlocks,
              column_blocks_);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        products[0][0][i] += products[2][0][i];
        products[1][0][i] += products[3][0][i];
      }
      const int to = work_.sums_at(work_.tile_at(tile), work_.warp, 1, 0);
      store_sums(sums + to, work_, products[0][0], products[1][0]);
    }
  }

  LLTM_INLINE void compute(const float* sums, int i) {
    const auto own = work_.owned_row(i);
    // Zeros in the product would not do, because weights may be infinite.
    const bool carries = own < after_.rows && resets_after_[i] == 0;
    const float d_h = carries ? work_.total(sums, i, 1, 0) : 0;
    d_cell_[i] = carries ? d_cell_[i] : 0;
    scalar_t* const to = own < step_.rows
        ? args_.d_preactivations + 3 * row_at(step_, i) + work_.unit
        : nullptr;
    UnitGradients<float> out{};
    if (to != nullptr) {
      const auto& of = factors_[i];
      out = args_.math.backward(
          d_h + of.grad_h,
          d_cell_[i] + of.grad_cell,
          of.tanh_cell,
          of.input_gate,
          of.output_gate,
          of.candidate);
      d_cell_[i] = out.d_old_cell;
    } else if (own < after_.rows) {
      const auto element = int64_t(own) * args_.state_size + work_.unit;
      args_.d_h0[element] = static_cast<scalar_t>(d_h);
      args_.d_c0[element] = static_cast<scalar_t>(d_cell_[i]);
    }
    publish<3>(
        machine_,
        to,
        args_.state_size,
        {out.d_pre_i, out.d_pre_o, out.d_pre_g});
  }

  const Machine& machine_;
  const Backward<scalar_t>& args_;
  const ThreadWork<tiles> work_;
  const int column_blocks_;
  uint32_t weights_[3][kColumnBlocks][1][2][4] = {};
  float d_cell_[ThreadWork<tiles>::kOwned] = {};
  Cursor after_; // the step that ran before this one, which is later in time
  Cursor step_;
  Cursor next_;
  Cursor ahead_; // the step after the next
  uint32_t published_at_ = 0;
  uint8_t resets_after_[ThreadWork<tiles>::kOwned] = {}; // of after_
  // These are of the step until its factors are made, then of the next.
  Saved saved_[ThreadWork<tiles>::kOwned] = {};
  Factors factors_[ThreadWork<tiles>::kOwned] = {};
};

} // namespace lltm::recurrence
