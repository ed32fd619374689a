// What the parts of the recurrence cost: a barrier of the whole grid, and
// microseconds a step of the kernels as they are, without their products,
// without waiting for other blocks (then the numbers are wrong), forward with
// its tiles as a pipeline, and with other times of the first look. A program
// without PyTorch; prints JSON.

#include "cuda/recurrence/backward.h"
#include "cuda/recurrence/forward.h"
#include "cuda/recurrence/gpu_machine.cuh"
#include "pipelined_forward.h"

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace lltm::recurrence;
using scalar_t = c10::BFloat16;

constexpr int kSteps = 1024;
constexpr int kRepeats = 5;

struct WithoutProducts : GpuMachine {
  template <typename>
  __device__ void mma(
      float (&sums)[4],
      const uint32_t (&weights)[4],
      uint32_t word0,
      uint32_t) const {
    sums[0] += __uint_as_float((weights[0] ^ word0) & 0x007fffffu);
  }
};

struct WithoutWaiting : GpuMachine {
  __device__ Words load_relaxed(const Words* from) const {
    auto words = GpuMachine::load_relaxed(from);
    for (auto& word : words.word) {
      word &= 0x3fff3fffu; // finite, and not the sentinel
    }
    return words;
  }
};

struct Pipelined : GpuMachine {};

struct FirstLook : GpuMachine {
  uint32_t clocks;

  __device__ void wait_since(uint32_t begin, uint32_t) const {
    GpuMachine::wait_since(begin, clocks);
  }
};

template <int tiles, typename Machine>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(
    const __grid_constant__ Forward<scalar_t> args,
    const Machine machine) {
  extern __shared__ __align__(16) float shared[];
  if constexpr (std::is_same_v<Machine, Pipelined>) {
    run_pipelined_forward<tiles>(machine, args, shared);
  } else {
    run_forward<tiles>(machine, args, shared);
  }
}

template <int tiles, typename Machine>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(
    const __grid_constant__ Backward<scalar_t> args,
    const Machine machine) {
  extern __shared__ __align__(16) float shared[];
  run_backward<tiles>(machine, args, shared);
}

__global__ void __launch_bounds__(kThreads, 1) barriers(uint32_t*) {
  for (int i = 0; i < kSteps; ++i) {
    cooperative_groups::this_grid().sync();
  }
}

// All blocks add to one word, and look at it.
__global__ void __launch_bounds__(kThreads, 1) counters(uint32_t* arrived) {
  for (uint32_t i = 1; i <= kSteps; ++i) {
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived)
                   : "memory");
      uint32_t seen = 0;
      while (seen < i * gridDim.x) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(seen)
                     : "l"(arrived)
                     : "memory");
      }
    }
    __syncthreads();
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

// All that a case needs, freed when it ends.
class Memory {
 public:
  template <typename T>
  T* zeros(size_t count) {
    T* data = nullptr;
    check(cudaMalloc(&data, count * sizeof(T)));
    check(cudaMemset(data, 0, count * sizeof(T)));
    owned_.push_back(data);
    return data;
  }

  ~Memory() {
    for (void* const data : owned_) {
      cudaFree(data);
    }
  }

 private:
  std::vector<void*> owned_;
};

// The median of repeats, before each of which all bytes of memory are value.
float microseconds_per_step(
    const void* kernel,
    unsigned blocks,
    size_t shared_bytes,
    void** arguments,
    void* memory,
    int value,
    size_t bytes) {
  check(cudaFuncSetAttribute(
      kernel,
      cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(shared_bytes)));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRepeats; ++i) {
    check(cudaMemset(memory, value, bytes));
    check(cudaEventRecord(begin));
    check(cudaLaunchCooperativeKernel(
        kernel,
        dim3(blocks),
        dim3(kThreads),
        arguments,
        shared_bytes,
        nullptr));
    check(cudaEventRecord(end));
    check(cudaDeviceSynchronize());
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    times.push_back(milliseconds * 1000 / kSteps);
  }
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[kRepeats / 2];
}

void print_barrier(const char* name, const void* kernel, unsigned blocks) {
  Memory memory;
  auto* word = memory.zeros<uint32_t>(1);
  void* arguments[] = {&word};
  const auto time = microseconds_per_step(
      kernel, blocks, 0, arguments, word, 0, sizeof(uint32_t));
  std::printf(
      "{\"blocks\": %u, \"barrier\": \"%s\", \"microseconds\": %.3f}\n",
      blocks,
      name,
      time);
}

// For so many tiles of a batch that the grid fits an H100.
template <int tiles, typename Machine>
void print(const char* name, int state_size, int batch, Machine machine) {
  Memory memory;
  const auto units = size_t(kSteps) * batch * state_size;
  const auto states = units / kSteps;
  Forward<scalar_t> forward{};
  forward.sequence.steps = kSteps;
  forward.sequence.batch = batch;
  forward.state_size = state_size;
  forward.weights = memory.zeros<scalar_t>(size_t(3) * state_size * state_size);
  forward.weights_strides[0] = state_size;
  forward.weights_strides[1] = 1;
  forward.launch_steps = kSteps;
  forward.first_step = {0, batch, 0};
  forward.h0 = memory.zeros<scalar_t>(states);
  forward.cell = memory.zeros<float>(states);
  forward.products = memory.zeros<scalar_t>(3 * units);
  forward.write_gates = true;
  forward.output = memory.zeros<scalar_t>(units);
  forward.cells = memory.zeros<scalar_t>(units);
  Backward<scalar_t> backward{};
  static_cast<Arguments<scalar_t>&>(backward) = forward;
  backward.last = {kSteps - 1, batch, int64_t(kSteps - 1) * batch};
  backward.gates = forward.products;
  backward.cells = forward.cells;
  backward.grad_output = memory.zeros<scalar_t>(units);
  backward.grad_cells = memory.zeros<scalar_t>(units);
  backward.d_gates = memory.zeros<scalar_t>(3 * units);
  backward.d_h0 = memory.zeros<scalar_t>(states);
  backward.d_c0 = memory.zeros<scalar_t>(states);
  const auto blocks =
      static_cast<unsigned>(grid_blocks(batch, state_size, tiles));
  void* of_forward[] = {&forward, &machine};
  void* of_backward[] = {&backward, &machine};
  const float times[] = {
      microseconds_per_step(
          reinterpret_cast<const void*>(&forward_kernel<tiles, Machine>),
          blocks,
          2 * tiles * forward.kSums * sizeof(float),
          of_forward,
          forward.output,
          0xff,
          units * sizeof(scalar_t)),
      microseconds_per_step(
          reinterpret_cast<const void*>(&backward_kernel<tiles, Machine>),
          blocks,
          2 * tiles * backward.kSums * sizeof(float),
          of_backward,
          backward.d_gates,
          0xff,
          3 * units * sizeof(scalar_t))};
  std::printf(
      "{\"size\": %d, \"batch\": %d, \"tiles\": %d, %s, "
      "\"forward\": %.3f, \"backward\": %.3f}\n",
      state_size,
      batch,
      tiles,
      name,
      times[0],
      times[1]);
  std::fflush(stdout);
}

} // namespace

int main() {
  for (const unsigned blocks : {8, 16, 32, 64, 128, 132}) {
    print_barrier(
        "cooperative_groups", reinterpret_cast<const void*>(&barriers), blocks);
    print_barrier("counter", reinterpret_cast<const void*>(&counters), blocks);
  }
  for (const int size : {256, 1024}) {
    print<1>("\"machine\": \"whole\"", size, 16, GpuMachine());
    print<1>("\"machine\": \"without products\"", size, 16, WithoutProducts());
    print<1>("\"machine\": \"without waiting\"", size, 16, WithoutWaiting());
  }
  // Predicted 2.5 us in place of 3.5 forward at 1024 units and 64 rows, and 1.8
  // in place of 2.1 at 32: then it belongs in csrc/cuda, and backward likewise.
  // If it saves less than 10 % there, delete it.
  print<2>("\"machine\": \"whole\"", 512, 64, GpuMachine());
  print<2>("\"machine\": \"pipelined\"", 512, 64, Pipelined());
  print<2>("\"machine\": \"whole\"", 1024, 32, GpuMachine());
  print<2>("\"machine\": \"pipelined\"", 1024, 32, Pipelined());
  print<4>("\"machine\": \"whole\"", 1024, 64, GpuMachine());
  print<4>("\"machine\": \"pipelined\"", 1024, 64, Pipelined());
  for (const uint32_t clocks : {0, 300, 400, 500, 600, 700, 800, 900}) {
    const auto name = "\"clocks\": " + std::to_string(clocks);
    const FirstLook machine{{}, clocks};
    for (const int size : {256, 512, 1024}) {
      print<1>(name.c_str(), size, 1, machine);
      print<1>(name.c_str(), size, 16, machine);
    }
    print<2>(name.c_str(), 256, 128, machine);
    print<2>(name.c_str(), 512, 64, machine);
    print<2>(name.c_str(), 1024, 32, machine);
    print<4>(name.c_str(), 1024, 64, machine);
  }
  return 0;
}
