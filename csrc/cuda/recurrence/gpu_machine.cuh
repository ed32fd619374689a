#pragma once

#include "cuda/recurrence/arguments.h"

#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

namespace lltm::recurrence {

// The operations of a GPU that the recurrence needs. Most are one instruction.
struct GpuMachine {
  __device__ int thread() const {
    return threadIdx.x;
  }

  __device__ int block() const {
    return blockIdx.x;
  }

  __device__ void sync_block() const {
    __syncthreads();
  }

  __device__ void sync_warp() const {
    __syncwarp();
  }

  // A thread that has looked for words so often waits in vain. A look takes a
  // read from L2, which is 0.1 to 1 us, so this takes 3 to 30 seconds on any
  // GPU. A right run waits for microseconds. Looks are counted and not time,
  // because time also passes while a debugger or another process has stopped
  // the whole GPU, and then nobody looks. Under a checker, looks are as slow as
  // what they wait for.
  static constexpr int kMostLooks = 1 << 25;

  // Ends the kernel. The driver prints the words of an assertion on stderr,
  // and those of printf before a trap may be lost. nvcc 13.0 does not know that
  // an assertion does not return, and would keep registers for what follows.
  __device__ void fail(const char* why) const {
    CUDA_KERNEL_ASSERT_MSG(false, why);
    __builtin_unreachable();
  }

  // Called between two looks. Here nothing else needs the thread.
  __device__ void pause() const {}

  // Each multiprocessor has its own.
  __device__ uint32_t clock() const {
    uint32_t clocks;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clocks)::"memory");
    return clocks;
  }

  __device__ void wait_since(uint32_t begin, uint32_t clocks) const {
    while (clock() - begin < clocks) {
    }
  }

  __device__ uint32_t shuffle_xor(uint32_t value, int mask) const {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }

  // Reads each word by itself, as the whole GPU sees it.
  __device__ Words load_relaxed(const Words* from) const {
    Words words;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.word[0]),
                   "=r"(words.word[1]),
                   "=r"(words.word[2]),
                   "=r"(words.word[3])
                 : "l"(from)
                 : "memory");
    return words;
  }

  // Loads into the cache that all blocks read. Otherwise the first read would
  // go to memory.
  __device__ void prefetch(const void* line) const {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }

  __device__ void store_relaxed(uint32_t* to, uint32_t value) const {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;"
                 :
                 : "l"(to), "r"(value)
                 : "memory");
  }

  // sums [16 x 8] += weights [16 x 16] @ words [16 x 8], of which each lane
  // holds its part.
  template <typename scalar_t>
  __device__ void mma(
      float (&sums)[4],
      const uint32_t (&weights)[4],
      uint32_t word0,
      uint32_t word1) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define LLTM_MMA(dtype)                                                      \
  asm volatile(                                                              \
      "mma.sync.aligned.m16n8k16.row.col.f32." dtype "." dtype               \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])           \
      : "r"(weights[0]),                                                     \
        "r"(weights[1]),                                                     \
        "r"(weights[2]),                                                     \
        "r"(weights[3]),                                                     \
        "r"(word0),                                                          \
        "r"(word1))
    if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
      LLTM_MMA("bf16");
    } else {
      LLTM_MMA("f16");
    }
#undef LLTM_MMA
#else
    // resident_blocks() refuses code that was compiled for older GPUs.
    __trap();
#endif
  }
};

} // namespace lltm::recurrence
