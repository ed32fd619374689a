#include "cuda/recurrence/backward.h"
#include "cuda/recurrence/forward.h"
#include "cuda/recurrence/gpu_machine.cuh"
#include "cuda/recurrence/launch.h"

#include <cstdint>

// This file is plain CUDA, so tests compile it without PyTorch's libraries.
namespace lltm::recurrence {

namespace {

// An SM runs one block: a thread needs over 128 registers, so two do not fit.
template <int tiles, typename scalar_t>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel_device(const __grid_constant__ Forward<scalar_t> args) {
  extern __shared__ __align__(16) float shared[];
  run_forward<tiles>(GpuMachine(), args, shared);
}

template <int tiles, typename scalar_t>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel_device(const __grid_constant__ Backward<scalar_t> args) {
  extern __shared__ __align__(16) float shared[];
  run_backward<tiles>(GpuMachine(), args, shared);
}

struct Kernel {
  const void* function;
  int tiles;
  int shared_bytes;
};

template <int tiles, typename scalar_t>
Kernel kernel_of(const Forward<scalar_t>&) {
  return {
      reinterpret_cast<const void*>(&forward_kernel_device<tiles, scalar_t>),
      tiles,
      2 * kForwardSums<tiles> * static_cast<int>(sizeof(float))};
}

template <int tiles, typename scalar_t>
Kernel kernel_of(const Backward<scalar_t>&) {
  return {
      reinterpret_cast<const void*>(&backward_kernel_device<tiles, scalar_t>),
      tiles,
      2 * kBackwardSums<tiles> * static_cast<int>(sizeof(float))};
}

// How many blocks the current device runs at once; 0 if it cannot run any.
int64_t resident_blocks(const Kernel& kernel) {
  int device = 0, cooperative = 0, processors = 0, blocks = 0;
  cudaFuncAttributes compiled{};
  const auto ask = [&](int& value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess;
  };
  const bool answered = cudaGetDevice(&device) == cudaSuccess &&
      cudaFuncGetAttributes(&compiled, kernel.function) == cudaSuccess &&
      ask(cooperative, cudaDevAttrCooperativeLaunch) &&
      ask(processors, cudaDevAttrMultiProcessorCount) &&
      cudaFuncSetAttribute(
          kernel.function,
          cudaFuncAttributeMaxDynamicSharedMemorySize,
          kernel.shared_bytes) == cudaSuccess &&
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &blocks, kernel.function, kThreads, kernel.shared_bytes) ==
          cudaSuccess;
  if (!answered) {
    cudaGetLastError(); // or the next launch check would find it
  }
  // mma.m16n8k16 exists from 8.0 on. A newer GPU may run code that was compiled
  // for an older one, which does not use it.
  const bool can = answered && cooperative != 0 && compiled.ptxVersion >= 80;
  return can ? int64_t(blocks) * processors : 0;
}

} // namespace

template <typename Args>
bool launch(const Args& args, cudaStream_t stream, int least_tiles) {
  // With fewer tiles in a block, more blocks work.
  const Kernel kernels[] = {
      kernel_of<1>(args), kernel_of<2>(args), kernel_of<4>(args)};
  for (const auto& kernel : kernels) {
    const auto blocks =
        grid_blocks(args.sequence.batch, args.state_size, kernel.tiles);
    if (kernel.tiles < least_tiles || blocks > resident_blocks(kernel)) {
      continue;
    }
    void* arguments[] = {const_cast<Args*>(&args)};
    const bool launched = cudaLaunchCooperativeKernel(
                              kernel.function,
                              dim3(static_cast<unsigned>(blocks)),
                              dim3(kThreads),
                              arguments,
                              kernel.shared_bytes,
                              stream) == cudaSuccess;
    if (!launched) {
      cudaGetLastError();
    }
    return launched;
  }
  return false;
}

template bool launch(const Forward<c10::Half>&, cudaStream_t, int);
template bool launch(const Forward<c10::BFloat16>&, cudaStream_t, int);
template bool launch(const Backward<c10::Half>&, cudaStream_t, int);
template bool launch(const Backward<c10::BFloat16>&, cudaStream_t, int);

} // namespace lltm::recurrence
