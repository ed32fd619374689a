// What the parts of the recurrence cost: microseconds a step of the kernels,
// and of the same without their products, or without waiting for other blocks
// (then the numbers are wrong). A program without PyTorch; prints JSON.

#include "cuda/recurrence/backward.h"
#include "cuda/recurrence/forward.h"
#include "cuda/recurrence/gpu_machine.cuh"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

using namespace lltm::recurrence;
using scalar_t = c10::BFloat16;

constexpr int kBatch = 16;
constexpr int kSteps = 1024;
constexpr int kRepeats = 5;
constexpr int kTiles = 1;

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

template <typename Machine>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ Forward<scalar_t> args) {
  extern __shared__ __align__(16) float shared[];
  run_forward<kTiles>(Machine(), args, shared);
}

template <typename Machine>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ Backward<scalar_t> args) {
  extern __shared__ __align__(16) float shared[];
  run_backward<kTiles>(Machine(), args, shared);
}

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

template <typename T>
T* zeros(size_t count) {
  T* data = nullptr;
  check(cudaMalloc(&data, count * sizeof(T)));
  check(cudaMemset(data, 0, count * sizeof(T)));
  return data;
}

// The median of repeats, each on a result that holds the sentinel.
template <typename Args>
float microseconds_per_step(
    const void* kernel,
    int shared_floats,
    Args args,
    scalar_t* result,
    size_t count) {
  const auto bytes = 2 * shared_floats * sizeof(float);
  check(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const auto blocks =
      static_cast<unsigned>(grid_blocks(kBatch, args.state_size, kTiles));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRepeats; ++i) {
    check(cudaMemset(result, 0xff, count * sizeof(scalar_t)));
    void* arguments[] = {&args};
    check(cudaEventRecord(begin));
    check(cudaLaunchCooperativeKernel(
        kernel, dim3(blocks), dim3(kThreads), arguments, bytes, nullptr));
    check(cudaEventRecord(end));
    check(cudaDeviceSynchronize());
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    times.push_back(milliseconds * 1000 / kSteps);
  }
  std::sort(times.begin(), times.end());
  return times[kRepeats / 2];
}

template <typename Machine>
void print(const char* name, int state_size) {
  const auto units = size_t(kSteps) * kBatch * state_size;
  const auto weights = size_t(3) * state_size * state_size;
  Forward<scalar_t> forward{};
  forward.sequence.steps = kSteps;
  forward.sequence.batch = kBatch;
  forward.state_size = state_size;
  forward.weights = zeros<scalar_t>(weights);
  forward.weights_strides[0] = state_size;
  forward.weights_strides[1] = 1;
  forward.count = kSteps;
  forward.first = {0, kBatch, 0};
  forward.h0 = zeros<scalar_t>(units / kSteps);
  forward.cell = zeros<float>(units / kSteps);
  forward.gates = zeros<scalar_t>(3 * units);
  forward.write_gates = true;
  forward.output = zeros<scalar_t>(units);
  forward.cells = zeros<scalar_t>(units);
  Backward<scalar_t> backward{};
  static_cast<Arguments<scalar_t>&>(backward) = forward;
  backward.last = {kSteps - 1, kBatch, int64_t(kSteps - 1) * kBatch};
  backward.gates = forward.gates;
  backward.cells = forward.cells;
  backward.grad_output = forward.cells;
  backward.grad_cells = forward.cells;
  backward.d_gates = zeros<scalar_t>(3 * units);
  backward.d_h0 = zeros<scalar_t>(units / kSteps);
  backward.d_c0 = zeros<scalar_t>(units / kSteps);
  const float times[] = {
      microseconds_per_step(
          reinterpret_cast<const void*>(&forward_kernel<Machine>),
          kForwardSums<kTiles>,
          forward,
          forward.output,
          units),
      microseconds_per_step(
          reinterpret_cast<const void*>(&backward_kernel<Machine>),
          kBackwardSums<kTiles>,
          backward,
          backward.d_gates,
          3 * units)};
  std::printf(
      "{\"size\": %d, \"batch\": %d, \"machine\": \"%s\", "
      "\"forward\": %.3f, \"backward\": %.3f}\n",
      state_size,
      kBatch,
      name,
      times[0],
      times[1]);
  std::fflush(stdout);
}

} // namespace

int main() {
  for (const int state_size : {256, 1024}) {
    print<GpuMachine>("whole", state_size);
    print<WithoutProducts>("without products", state_size);
    print<WithoutWaiting>("without waiting", state_size);
  }
  return 0;
}
