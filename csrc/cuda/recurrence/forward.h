#pragma once

#include "cuda/recurrence/block.h"

#include <cstdint>

namespace lltm::recurrence {

// A block looks for what others have published so long after it has published.
// A look that finds nothing costs another way to L2 and back. 700 is within 4 %
// of the best at each size but 1024 units and 16 rows, where 900 would save
// 10 % (docs/benchmarks/h100/first_look.csv).
constexpr uint32_t kForwardClocksToLook = 700;

// A block's part of the forward recurrence. While it waits for h it does what
// needs no h: it stores the last step's results, loads the next step's products
// with input into registers, and those of the step after that into L2. No load
// from memory may be under way when it looks, because loads return in order.
template <int tiles, typename scalar_t, typename Machine>
class ForwardBlock {
 public:
  LLTM_INLINE ForwardBlock(
      const Machine& machine,
      const Forward<scalar_t>& args)
      : machine_(machine),
        args_(args),
        work_(machine.block(), machine.thread(), args.state_size),
        column_blocks_(work_.column_blocks(args.state_size / kColumns)) {
    load_weights_for_h();
  }

  // sums: 2 * tiles * kSums.
  LLTM_INLINE void run(float* sums) {
    begin();
    for (int32_t turn = 0; turn < args_.launch_steps; ++turn) {
      float* const own = sums + turn % 2 * (tiles * args_.kSums);
      multiply(own, turn);
      machine_.sync_block();
      UnitResults<float> out[work_.kOwned];
#pragma unroll
      for (int i = 0; i < work_.kOwned; ++i) {
        out[i] = compute(own, i);
      }
      published_at_ = machine_.clock();
#pragma unroll
      for (int i = 0; i < work_.kOwned; ++i) {
        if (work_.owned_row(i) < step_.rows) {
          store(out[i], i);
        }
        load_products(next_, i);
      }
      before_ = step_;
      step_ = next_;
      next_ = ahead_;
    }
    end();
  }

 private:
  LLTM_INLINE void begin() {
    before_ = args_.before;
    step_ = args_.first_step;
    next_ = step_after(step_, 0);
    load_resets_of_lanes(step_);
#pragma unroll
    for (int i = 0; i < work_.kOwned; ++i) {
      if (work_.owned_row(i) < args_.sequence.batch) {
        cell_[i] = args_.cell[state_at(0, i)];
      }
      load_products(step_, i);
    }
  }

  LLTM_INLINE void end() {
#pragma unroll
    for (int i = 0; i < work_.kOwned; ++i) {
      if (work_.owned_row(i) < args_.sequence.batch) {
        args_.cell[state_at(0, i)] = cell_[i];
      }
    }
  }

  LLTM_INLINE void load_weights_for_h() {
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      if (i < column_blocks_) {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          load_weights(weights_[i][gate], work_, [&](int row, int column) {
            return args_.weight(
                gate * args_.state_size + work_.first_unit + row,
                kColumns * (work_.warp + i * kWarps) + column);
          });
        }
      }
    }
  }

  // The place of owned element i in a tensor of states, of which the rows
  // begin at first_row.
  LLTM_INLINE int64_t state_at(int64_t first_row, int i) const {
    return (first_row + work_.owned_row(i)) * args_.state_size + work_.unit;
  }

  LLTM_INLINE scalar_t* products_of(Cursor step, int i) const {
    const auto row = step.first_row - args_.products_row + work_.owned_row(i);
    return args_.products + row * 3 * args_.state_size + work_.unit;
  }

  // The step that this launch runs after that of a turn, or one without rows.
  LLTM_INLINE Cursor step_after(Cursor step, int32_t turn) const {
    if (turn + 1 >= args_.launch_steps) {
      return {0, 0, 0};
    }
    return args_.sequence.reverse ? step.before(args_.sequence)
                                  : step.after(args_.sequence);
  }

  // Rows that did not run before begin with h0, and rows that are reset with
  // zeros.
  LLTM_INLINE Source<scalar_t>
  source_of(int tile, const Cursor& step, const Cursor& before) const {
    const auto row = work_.row_of_lane(tile);
    if (row >= step.rows || resets_of_lane_[tile] != 0) {
      return {nullptr, false};
    }
    const bool waits = row < before.rows;
    const scalar_t* const from =
        waits ? args_.output + before.first_row * args_.state_size : args_.h0;
    return {
        from + int64_t(row) * args_.state_size + work_.first_column(), waits};
  }

  // A line is 16 units of a row, so one of their threads asks for it.
  LLTM_INLINE void prefetch(Cursor step) const {
#pragma unroll
    for (int i = 0; i < work_.kOwned; ++i) {
      if (work_.owned_row(i) < step.rows && work_.unit_of_block == 0) {
        machine_.prefetch(args_.output + state_at(step.first_row, i));
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          machine_.prefetch(products_of(step, i) + gate * args_.state_size);
        }
      }
    }
  }

  LLTM_INLINE void load_resets_of_lanes(Cursor step) {
    if (args_.resets != nullptr) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        const auto row = work_.row_of_lane(tile);
        resets_of_lane_[tile] =
            row < step.rows ? args_.resets[step.first_row + row] : 0;
      }
    }
  }

  LLTM_INLINE void load_products(Cursor step, int i) {
    if (work_.owned_row(i) < step.rows) {
      const scalar_t* const products = products_of(step, i);
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        products_[i][gate] = products[gate * args_.state_size];
      }
      if (args_.resets != nullptr) {
        resets_[i] = args_.resets[step.first_row + work_.owned_row(i)];
      }
    }
  }

  // Finds where h of the step goes.
  LLTM_INLINE void find_places() {
#pragma unroll
    for (int i = 0; i < work_.kOwned; ++i) {
      to_[i] = work_.owned_row(i) < step_.rows
          ? args_.output + state_at(step_.first_row, i)
          : nullptr;
    }
  }

  // Adds up the products with h of this warp's columns.
  LLTM_INLINE void multiply(float* sums, int32_t turn) {
    Source<scalar_t> sources[tiles];
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      sources[tile] = source_of(tile, step_, before_);
    }
    machine_.wait_since(published_at_, kForwardClocksToLook);
    Gathered gathered[2];
#pragma unroll
    for (int tile = 0; tile < 2 && tile < tiles; ++tile) {
      gathered[tile].begin(machine_, sources[tile], 0, column_blocks_);
    }
    // While the words are on their way.
    ahead_ = step_after(next_, turn + 1);
    prefetch(ahead_);
    load_resets_of_lanes(next_);
    find_places();
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile) {
      gathered[tile % 2].finish(machine_, sources[tile], 0);
      float products[2][3][4] = {};
      gathered[tile % 2].template multiply<scalar_t>(
          machine_, weights_, products);
      if (tile + 2 < tiles) {
        gathered[tile % 2].begin(
            machine_, sources[tile + 2], 0, column_blocks_);
      }
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        const int to = work_.sums_at(work_.tile_at(tile), work_.warp, 3, gate);
        store_sums(sums + to, work_, products[0][gate], products[1][gate]);
      }
    }
  }

  LLTM_INLINE UnitResults<float> compute(const float* sums, int i) {
    UnitResults<float> out{};
    if (to_[i] != nullptr) {
      float sum[3];
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        sum[gate] = work_.total(sums, i, 3, gate) + products_[i][gate];
      }
      const float old_cell = resets_[i] != 0 ? 0 : cell_[i];
      out = args_.math.forward(sum[0], sum[1], sum[2], old_cell);
      cell_[i] = out.new_cell;
    }
    publish<1>(machine_, to_[i], 0, {out.new_h});
    return out;
  }

  LLTM_INLINE void store(const UnitResults<float>& out, int i) const {
    args_.cells[state_at(step_.first_row, i)] =
        static_cast<scalar_t>(out.new_cell);
    if (args_.write_gates) {
      scalar_t* const gates = products_of(step_, i);
      gates[0] = static_cast<scalar_t>(out.input_gate);
      gates[args_.state_size] = static_cast<scalar_t>(out.output_gate);
      gates[2 * args_.state_size] = static_cast<scalar_t>(out.candidate);
    }
  }

  const Machine& machine_;
  const Forward<scalar_t>& args_;
  ThreadWork<tiles> work_;
  const int column_blocks_;
  uint32_t weights_[kColumnBlocks][3][2][4] = {};
  float cell_[ThreadWork<tiles>::kOwned] = {};
  Cursor before_; // the step that ran before, without rows if none did
  Cursor step_;
  Cursor next_;
  Cursor ahead_; // the step after the next
  uint32_t published_at_ = 0;
  scalar_t* to_[ThreadWork<tiles>::kOwned] = {}; // where h goes, or null
  // These are of the step until they are used, then of the next.
  scalar_t products_[ThreadWork<tiles>::kOwned][3] = {};
  uint8_t resets_[ThreadWork<tiles>::kOwned] = {};
  uint8_t resets_of_lane_[tiles] = {};
};

} // namespace lltm::recurrence
