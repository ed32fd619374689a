#pragma once

#include "cpu/cell_sizes.h"
#include "cpu/primitives/cpu_capability.h"

#include <ATen/Parallel.h>

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

// What the kernels choose: which path a call takes, sizes of blocks, and how
// long work is expected to take. Results differ by rounding at most.
//
// A comment names the processors on which a choice was measured, in float32;
// others take it over. Zen 5 has 48 KiB of L1 in 12 ways and 1 MiB of L2, Zen 4
// 32 KiB in 8 ways and 1 MiB, the Xeon 48 KiB in 12 ways, 2 MiB, and a slow L3.
// The roof is that of docs/performance.md.
namespace lltm {

// Caches of a core.

inline int64_t l1_ways() {
#if defined(_SC_LEVEL1_DCACHE_ASSOC)
  static const int64_t ways = sysconf(_SC_LEVEL1_DCACHE_ASSOC);
  return ways > 0 ? ways : 8;
#else
  return 8;
#endif
}

inline int64_t l2_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? bytes : 1 << 20;
#else
  return 1 << 20;
#endif
}

// How long work takes, to decide how many threads it is worth. Zen 5.

constexpr int64_t kFlopPerNanosecond = 200;
constexpr int64_t kPackedPerNanosecond = 4; // elements copied to another layout
constexpr int64_t kBytesPerNanosecond = 100; // of weights that are read
constexpr int64_t kNanosecondsOfGates = 1;   // of a hidden unit
constexpr int64_t kNanosecondsOfGatesBackward = 2;

// To wake a thread costs 1 to 3 us.
constexpr int64_t kNanosecondsWorthAThread = 5000;
// A barrier costs some 200 ns.
constexpr int64_t kNanosecondsWorthABarrier = 500;
// Some 30 us. Who has not come to a barrier by then may be waiting for this
// very core.
constexpr int kSpinsOfABarrier = 2000;

// The grain size for at::parallel_for: so many tasks are worth waking a thread.
inline int64_t grain_size(int64_t nanoseconds_per_task) {
  return std::max<int64_t>(
      1, kNanosecondsWorthAThread / std::max<int64_t>(1, nanoseconds_per_task));
}

// Products of blocks.

// Terms of one chain of additions. So few keep the error below twice that of
// PyTorch's products; a chain of 768 has 2.5 times their error. With 512 the
// cell at 256x1024x1024 and sequences take 2 % less time than with 256, on
// Zen 4. In bfloat16 the rounding of inputs and results is larger than the
// error of any chain. There, 2048 in place of 512 save 9 % at 256x1024x1024 on
// the Xeon and 7 % on Zen 4, 17 and 13 % at 32x1024x1024, and cost 3 and 0 % at
// 512x512x512.
template <typename gemm_t>
constexpr int64_t kMaxK = sizeof(gemm_t) == 2 ? 2048 : 512;
// Terms that AMX multiplies at a time; other products take pairs of bfloat16.
// On the Xeon oneDNN's products run at 2000 GFLOP/s for whole tiles, at 900 to
// 1400 for other sizes, and at 340 for some, like 388 and 556.
inline int64_t terms_of_a_tile() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool has_amx = __builtin_cpu_supports("amx-bf16");
  return has_amx ? 32 : 2;
#else
  return 2;
#endif
}
// With so many terms or more, those beyond whole tiles are a product of their
// own, where operands cannot be padded. On the Xeon 512x256x300 takes 43 % less
// time in bfloat16; 100x100x300, with 400 terms, takes 6 % more.
constexpr int64_t kTermsWorthTwoProducts = 384;
// Rows of C in a call: few sizes, for oneDNN generates a kernel for each.
constexpr int64_t kMaxRowsOfACall = 128;
// Up to so many rows of A, vectors of our own stream B faster: at 210 GB/s from
// L2, where oneDNN reaches 130. Zen 5.
constexpr int64_t kMaxStreamedRows = 2;
// Vectors of columns that they read side by side.
constexpr int64_t kStreamedVectors = 3;

// The columns of B in a vector of the microkernel. Packed panels of B are
// padded to whole vectors.
constexpr int64_t kVector = 16;

// What the batch is padded to: with AVX2 a vector of float32 has 8 columns.
template <typename gemm_t>
int64_t columns_of_a_vector() {
  return std::is_same_v<gemm_t, float> &&
          cpu_capability() == CPUCapability::kAVX2
      ? kVector / 2
      : kVector;
}

// The size of blocks of hidden units or columns, at most so large, and at least
// so large where that is possible. If there are few blocks, each thread gets as
// much as any other: on two threads of the Xeon, 512x2048x130 takes 27 % less
// time with four blocks of 33 units than with 48, 48 and 34. Many blocks have
// whole vectors, and so do those of one thread.
inline int64_t
size_of_a_block(int64_t size, int64_t most, int64_t least = kVector) {
  const int64_t threads = at::get_num_threads();
  const auto blocks = at::divup(size, most);
  const auto even =
      std::min(at::divup(blocks, threads) * threads, size / least);
  return threads > 1 && blocks < 4 * threads && even >= blocks
      ? at::divup(size, even)
      : at::divup(at::divup(size, kVector), blocks) * kVector;
}

// The cell forward.

// Whether rows, which lie so many bytes apart, fall on the same sets of the L1
// cache: about a multiple of 4 KiB.
inline bool rows_collide(int64_t row_bytes) {
  constexpr int64_t kCacheLine = 64;
  return row_bytes > kCacheLine &&
      (row_bytes + kCacheLine) % 4096 <= 2 * kCacheLine;
}

// Whether it is faster to multiply the weights as they lie, with all rows of
// the batch at once, than to pack the batch. It is for small batches. Where
// rows of weights collide, packing is faster only for more than 16 rows of the
// batch. Zen 5.
constexpr int64_t kMaxDotBatch = 16;
inline bool is_dot_faster(const CellSizes& sizes, int64_t element_size) {
  const bool collide = rows_collide(sizes.features() * element_size);
  return sizes.batch <= (collide ? kMaxDotBatch : kMaxDotBatch / 2);
}
// Hidden units of a block on that path. If the batch has more than four rows,
// all of them are multiplied with kDotRows rows of weights while these lie in
// the cache, and then with the next rows of weights.
constexpr int64_t kDotUnits = 48;
constexpr int64_t kDotRows = 24;

// Rows of the batch that are packed side by side. At 256x1024x1024, 64 reach
// 96 % of the roof on Zen 4 (32: 80), and 95 on the Xeon (89); elsewhere they
// are within 2 %.
constexpr int64_t kPanelWidth = 64;
// Rows of a last panel that GemmOf24Columns multiplies, with AVX-512: at least
// 17, if the batch would fill half of its last vector at most. On Zen 4 it runs
// at oneDNN's rate, so 24x100x300 takes 19 % less time, 200x512x512 15 %.
inline int64_t rows_of_folded_panel(int64_t batch) {
  const auto rest = batch % kVector;
  return cpu_capability() == CPUCapability::kAVX512 && batch > kVector &&
          rest > 0 && rest <= kVector / 2
      ? kVector + rest
      : 0;
}
// Features of a panel that are packed as one task.
constexpr int64_t kPackedFeatures = 512;
// Rows of weights that a call multiplies with one panel. oneDNN reads some 12
// rows side by side for 32 columns, and more for 16. If they collide in a cache
// of 8 ways, calls of few rows lose less: on Zen 4 products run at 113 GFLOP/s
// for 32 columns (105 in one call) and at 109 for 16 (55). Zen 5, with 12 ways,
// reaches 90 % of the roof at 32x512x512 in one call; 16 columns were not
// measured there.
inline int64_t rows_of_weights_in_a_call(int64_t row_bytes, int64_t width) {
  if (rows_collide(row_bytes)) {
    if (width <= 16) {
      return 8;
    }
    if (width <= 32 && l1_ways() <= 8) {
      return 16;
    }
  }
  return std::numeric_limits<int64_t>::max();
}
// Products of a gate that a block computes for one panel.
constexpr int64_t kProductsOfAGate = 4096;
// The products of so many panels are kept until the last K.
constexpr int64_t kMaxPanelsPerTask = 8;
// Hidden units of a block, at most.
constexpr int64_t kMaxUnits = 128;
// Hidden units of a block, at least. Where one panel and few units would leave
// threads idle, half a vector of units is worth a block if the step is long: on
// two threads of Zen 4, 64x2048x31 takes 25 % less time, and 64x513x17 would
// take more.
inline int64_t least_units(int64_t panels, int64_t nanoseconds) {
  return panels == 1 && nanoseconds >= 4 * kNanosecondsWorthAThread
      ? kVector / 2
      : kVector;
}

// The cell backward.

// Elements of a block of d_weights. Zen 5.
constexpr int64_t kWeightsBlock = 24576;
// Columns of a block, at most. Wide blocks are written in long runs, so they
// are for small batches, where each result is a sum of few terms. On the Xeon
// backward takes 44 % less time than with 64 columns at 16x1x1000, and 12 % at
// 64x1024x1024; at 512x512x512 it would take 13 % more with 512. In bfloat16,
// 256 columns take 30 % less time than 2048 at 8x1024x1024. On Zen 4 training
// takes 21 % less at 16x1x1000, and the same at larger shapes. A power of two:
// few sizes, for oneDNN generates a kernel for each.
inline int64_t weights_panel(int64_t batch, int64_t element_size) {
  const int64_t elements = element_size == 2 ? 16384 : 32768;
  const int64_t most = element_size == 2 ? 256 : 2048;
  int64_t width = 64;
  while (2 * width <= most && 2 * width * batch <= elements) {
    width *= 2;
  }
  return width;
}
// Hidden units whose gradients are computed at a time, for 16 rows. Zen 5;
// others were not faster on the Xeon.
constexpr int64_t kUnitsOfABackwardBlock = 64;

// Rows of d_input and d_old_h that are computed as one task: the products of
// types that are converted need memory.
constexpr int64_t kRowsOfATask = 1024;

// Sequences.

// With fewer steps, packing the weights pays only at few sizes. Zen 5.
constexpr size_t kStepsWorthPacking = 8;
// For one or two rows of the batch, and weights of which L2 keeps a third at
// most, packing them pays later: as they lie they are read from L3 almost as
// fast. On the Xeon 50x1x1024x1024 takes 16 % less time without packing, and
// 8x2x2048x2048 half; 500x1x1024x1024 would take 3 % more, 100x1x512x512 29 %.
// On Zen 4 16x1x1024x1024 takes a third less, 8x2x2048x2048 70 %, and
// 50x1x1024x1024 the same.
// It is asked about sequences of kStepsWorthPacking steps and more.
constexpr size_t kMostStepsUnpacked = 64;
inline bool
is_packing_faster(int64_t batch, size_t steps, int64_t weight_bytes) {
  return batch > kMaxStreamedRows || steps > kMostStepsUnpacked ||
      weight_bytes <= 3 * l2_bytes();
}
// The same for backward. With fewer steps it takes the rows of weights as they
// lie. Zen 5.
constexpr size_t kStepsWorthPackingBackward = 5;
// Rows of a chunk: many, for d_weights is read and written once in each.
constexpr int64_t kRowsOfABackwardChunk = 1024;
// Units of a panel backward where pairs are multiplied. By the size alone, so
// that results do not depend on the number of threads. (They do, by rounding,
// where oneDNN has no kernel: the BLAS that PyTorch takes then may sum in
// another order for other sizes.)
constexpr int64_t backward_panel(int64_t state_size) {
  return state_size >= 512 ? 64 : 32;
}
// Steps take the blocks of weights in alternating order, so a step begins with
// the blocks that the step before it has left in the cache. On the Xeon
// 50x1x1024x1024 takes 8 % less time on one thread and 17 % on two, and
// 100x1x512x512 35 % less on one. This is the block that a step takes as its
// i-th.
constexpr int64_t block_in_turn(int64_t step, int64_t i, int64_t blocks) {
  return step % 2 == 0 ? i : blocks - 1 - i;
}

// Rows of the batch that each thread must have to take all weights by itself:
// few, where these fit in its cache, else so many that their products take
// longer than reading the weights. Zen 5.
inline int64_t rows_worth_all_weights(int64_t weight_bytes) {
  return weight_bytes <= 512 * 1024 ? 8 : 32;
}

} // namespace lltm
