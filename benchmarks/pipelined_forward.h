#pragma once

#include "cuda/recurrence/forward.h"

#include <cstdint>

// The forward recurrence with the tiles of a block as a pipeline: a variant
// that no GPU has judged, so it is no part of lltm_ops.
//
// The next step of a tile needs h of that tile alone. So while the blocks pass
// on h of one tile, they compute the others. Each tile of a step has a barrier
// of its own. Half of the warps then compute its gates, and the other half goes
// on with the products of the next tile. A warp begins to read the next tile's
// h before it multiplies that of this one.
//
// All blocks take the tiles in one order. One buffer of sums is enough, because
// another tile's barrier lies between a sum and the next one in its place.
namespace lltm::recurrence {

template <int tiles, typename scalar_t, typename Machine>
class PipelinedForwardBlock : ForwardBlock<tiles, scalar_t, Machine> {
  static_assert(tiles % 2 == 0);
  using Base = ForwardBlock<tiles, scalar_t, Machine>;
  using Base::ahead_;
  using Base::args_;
  using Base::before_;
  using Base::column_blocks_;
  using Base::machine_;
  using Base::next_;
  using Base::step_;
  using Base::work_;

 public:
  LLTM_INLINE PipelinedForwardBlock(
      const Machine& machine,
      const Forward<scalar_t>& args)
      : Base(machine, args) {
    work_.block = 0; // so that tile_at(i) is i
  }

  // sums: tiles * kSums.
  LLTM_INLINE void run(float* sums) {
    this->begin();
    source_ = this->source_of(0, step_, before_);
    gathered_[0].begin(machine_, source_, 0, column_blocks_);
    for (int32_t turn = 0; turn < args_.launch_steps; ++turn) {
      ahead_ = this->step_after(next_, turn + 1);
      this->prefetch(ahead_);
      this->find_places();
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        multiply(sums, tile);
        machine_.sync_block();
        if (work_.first_tile == tile % 2) {
          compute(sums, tile / 2);
        }
      }
      before_ = step_;
      step_ = next_;
      next_ = ahead_;
    }
    this->end();
  }

 private:
  LLTM_INLINE void multiply(float* sums, int tile) {
    auto& words = gathered_[tile % 2];
    words.finish(machine_, source_, 0);
    if (args_.resets != nullptr) {
      this->load_reset_of_lane(next_, tile); // that of this step has been used
    }
    source_ = tile + 1 < tiles ? this->source_of(tile + 1, step_, before_)
                               : this->source_of(0, next_, step_);
    gathered_[(tile + 1) % 2].begin(machine_, source_, 0, column_blocks_);
    float products[2][3][4] = {};
    words.template multiply<scalar_t>(machine_, this->weights_, products);
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      const int to = work_.sums_at(tile, work_.warp, 3, gate);
      store_sums(sums + to, work_, products[0][gate], products[1][gate]);
    }
  }

  LLTM_INLINE void compute(const float* sums, int i) {
    const auto out = Base::compute(sums, i);
    if (work_.owned_row(i) < step_.rows) {
      this->store(out, i);
    }
    this->load_products(next_, i);
  }

  Source<scalar_t> source_; // of the tile that is read
  Gathered gathered_[2];    // of the tile that is multiplied, and that one
};

// With one tile there is nothing to overlap.
template <int tiles, typename scalar_t, typename Machine>
LLTM_INLINE void run_pipelined_forward(
    const Machine& machine,
    const Forward<scalar_t>& args,
    float* shared) {
  if constexpr (tiles == 1) {
    run_forward<tiles>(machine, args, shared);
  } else {
    PipelinedForwardBlock<tiles, scalar_t, Machine>(machine, args).run(shared);
  }
}

} // namespace lltm::recurrence
