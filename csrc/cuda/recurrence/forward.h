#pragma once

#include "cuda/recurrence/block.h"

#include <cstdint>

namespace lltm::recurrence {

template <int tiles>
constexpr int kForwardSums = tiles * kWarps * 3 * kUnits * kSumStride;

// A block's part of the forward recurrence. It computes addresses and loads
// from memory, which need no h, while the other blocks compute theirs.
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
  // From here on, everything belongs to the step that runs next.
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

} // namespace lltm::recurrence
