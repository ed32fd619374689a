#pragma once

#include "cuda/recurrence/arguments.h"

#include <cstdint>

// Code that the blocks of both directions share.
namespace lltm::recurrence {

// A lane, by the words of the PTX ISA. arguments.h draws what it holds.
struct Lane {
  int warp;
  int group;
  int quad;

  LLTM_INLINE explicit Lane(int thread)
      : warp(thread / 32), group(thread % 32 / 4), quad(thread % 4) {}
};

// The work of a thread: as a lane, and for the elements of the state that it
// owns.
template <int tiles>
struct ThreadWork : Lane {
  static constexpr int kOwned = (tiles + 1) / 2;

  int block;
  int unit_of_block;
  int row_of_tile;
  int first_tile;
  int first_unit;
  int first_row;
  int unit;

  LLTM_INLINE ThreadWork(int block, int thread, int state_size)
      : Lane(thread), block(block) {
    const int blocks = state_size / kUnits;
    unit_of_block = thread % kUnits;
    row_of_tile = thread / kUnits % kTileRows;
    first_tile = thread / (kUnits * kTileRows);
    first_unit = block % blocks * kUnits;
    first_row = block / blocks * tiles * kTileRows;
    unit = first_unit + unit_of_block;
  }

  // The number of blocks of columns that this warp takes.
  LLTM_INLINE int column_blocks(int all) const {
    return (all - warp + kWarps - 1) / kWarps;
  }

  // The column at which a lane's first 16 bytes of a row begin.
  LLTM_INLINE int first_column() const {
    return kColumns * warp + 8 * quad;
  }

  // A block reads the rows of its tiles in this order. Each begins with another
  // one, because L2 is slower if all read the same lines at once.
  LLTM_INLINE int tile_at(int i) const {
    return (i + block) % tiles;
  }

  // All rows here are rows of the batch.
  LLTM_INLINE int row_of_lane(int i) const {
    return first_row + tile_at(i) * kTileRows + group;
  }

  // With a single tile, half of the threads own nothing.
  LLTM_INLINE int owned_row(int i) const {
    constexpr int kNone = INT32_MAX;
    const int tile = first_tile + 2 * i;
    return tile < tiles ? first_row + tile * kTileRows + row_of_tile : kNone;
  }

  // The place of a warp's partial sums for one of so many gates. Backward adds
  // up over gates, so it has one.
  LLTM_INLINE static int sums_at(int tile, int warp, int gates, int gate) {
    return ((tile * kWarps + warp) * gates + gate) * kUnits * kSumStride;
  }

  // The sum over all warps for element i of those that the thread owns.
  LLTM_INLINE float total(const float* sums, int i, int gates, int gate) const {
    float of_warp[kWarps];
#pragma unroll
    for (int from = 0; from < kWarps; ++from) {
      const int begin = sums_at(first_tile + 2 * i, from, gates, gate);
      of_warp[from] = sums[begin + unit_of_block * kSumStride + row_of_tile];
    }
    // Added in pairs, which makes a shorter chain.
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

// Loads the weights of two mma: weight(row, column) for 16 rows and 32 columns.
// A lane takes eight columns that lie together, so it needs 16 bytes of a row
// of h for both mma. This changes the order of a sum and nothing else.
template <typename F>
LLTM_INLINE void
load_weights(uint32_t (&weights)[2][4], const Lane& lane, const F& weight) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane.group + i % 2 * 8;
      const int column = 8 * lane.quad + 4 * half + i / 2 * 2;
      weights[half][i] = pack(weight(row, column), weight(row, column + 1));
    }
  }
}

LLTM_INLINE bool has_arrived(const Words& words) {
  return words.word[0] != kSentinel && words.word[1] != kSentinel &&
      words.word[2] != kSentinel && words.word[3] != kSentinel;
}

// The part that a lane reads of a row that other blocks may still be writing:
// 16 bytes of every block of columns of its warp.
template <typename scalar_t>
struct Source {
  const scalar_t* from; // the first of them, or null: zeros
  bool waits;           // until all have arrived
};

// Up to kColumnBlocks of the blocks of columns of a warp.
class Gathered {
 public:
  // Begins to read up to kColumnBlocks blocks, from first_block on.
  template <typename scalar_t, typename Machine>
  LLTM_INLINE void begin(
      const Machine& machine,
      const Source<scalar_t>& source,
      int first_block,
      int blocks) {
    blocks_ = blocks - first_block;
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      const bool exists = source.from != nullptr && i < blocks_;
      words_[i] = exists ? load(machine, source, first_block + i) : Words{};
    }
  }

  template <typename scalar_t, typename Machine>
  LLTM_INLINE void finish(
      const Machine& machine,
      const Source<scalar_t>& source,
      int first_block) {
    const auto arrived = [&](int i) {
      const bool before = has_arrived(words_[i]);
      if (!before) {
        words_[i] = load(machine, source, first_block + i);
      }
      return before;
    };
    if (source.waits) {
      // Without a loop over i, because nvcc 13.0 does not unroll it, and words_
      // would lie in memory.
      static_assert(kColumnBlocks == 4);
      for (int looks = 1; !(arrived(0) & arrived(1) & arrived(2) & arrived(3));
           ++looks) {
        if (looks == Machine::kMostLooks) {
          machine.fail(
              "lltm: a block of the recurrence waited in vain for another; "
              "with LLTM_CUDA_RECURRENCE=0 sequences run step by step");
        }
        machine.pause();
      }
    }
    machine.sync_warp(); // mma needs all lanes
  }

  // products[chain][gate] += weights[i][gate] @ block i, for all i. The
  // halves of the blocks are in different chains, each of which is shorter.
  template <typename scalar_t, int gates, int chains, typename Machine>
  LLTM_INLINE void multiply(
      const Machine& machine,
      const uint32_t (&weights)[kColumnBlocks][gates][2][4],
      float (&products)[chains][gates][4]) const {
#pragma unroll
    for (int i = 0; i < kColumnBlocks; ++i) {
      if (i < blocks_) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int gate = 0; gate < gates; ++gate) {
            machine.template mma<scalar_t>(
                products[(2 * i + half) % chains][gate],
                weights[i][gate][half],
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
  int blocks_; // from the first on; the same in all lanes of a warp
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

// Publishes values of two units as one word each, from the lane of the first,
// at to + i * stride. All lanes have to call it; those that publish nothing,
// with null.
template <int count, typename scalar_t, typename Machine>
LLTM_INLINE void publish(
    const Machine& machine,
    scalar_t* to,
    int32_t stride,
    const float (&values)[count]) {
  uint32_t words[count];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const auto own = static_cast<scalar_t>(values[i]);
    scalar_t other;
    other.x = machine.shuffle_xor(own.x, 1);
    words[i] = pack(own, other);
  }
  if (to != nullptr && machine.thread() % 2 == 0) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      machine.store_relaxed(
          reinterpret_cast<uint32_t*>(to + int64_t(i) * stride), words[i]);
    }
  }
}

} // namespace lltm::recurrence
