#include "cuda/recurrence/cuda_launch.h"
#include "cuda/recurrence/gpu_machine.cuh"
#include "cuda/recurrence/launch.h"

#include <cstdint>
#include <string>

// Plain CUDA: tests compile it without PyTorch's libraries.
namespace lltm::recurrence {

namespace {

// An SM runs one block: two would need more registers than it has.
template <int tiles, typename scalar_t>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel_device(const __grid_constant__ Forward<scalar_t> args) {
  extern __shared__ __align__(16) float shared[];
  ForwardBlock<tiles, scalar_t, GpuMachine>(GpuMachine(), args).run(shared);
}

template <int tiles, typename scalar_t>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel_device(const __grid_constant__ Backward<scalar_t> args) {
  extern __shared__ __align__(16) float shared[];
  BackwardBlock<tiles, scalar_t, GpuMachine>(GpuMachine(), args).run(shared);
}

template <typename scalar_t>
auto* kernel_of(const Forward<scalar_t>&, int tiles) {
  return tiles == 1 ? forward_kernel_device<1, scalar_t>
      : tiles == 2  ? forward_kernel_device<2, scalar_t>
                    : forward_kernel_device<4, scalar_t>;
}

template <typename scalar_t>
auto* kernel_of(const Backward<scalar_t>&, int tiles) {
  return tiles == 1 ? backward_kernel_device<1, scalar_t>
      : tiles == 2  ? backward_kernel_device<2, scalar_t>
                    : backward_kernel_device<4, scalar_t>;
}

struct CurrentGpu {
  cudaStream_t stream;
  std::string error = {};

  bool succeeds(cudaError_t result) {
    if (result != cudaSuccess) {
      cudaGetLastError(); // or the next launch check would find it
      error = std::string(cudaGetErrorName(result)) + ": " +
          cudaGetErrorString(result);
    }
    return result == cudaSuccess;
  }

  template <typename Args>
  int64_t resident_blocks(const Args& args, int tiles, int shared_bytes) {
    auto* const kernel = kernel_of(args, tiles);
    int device = 0, cooperative = 0, processors = 0, most_shared = 0;
    cudaFuncAttributes compiled{};
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      return succeeds(cudaDeviceGetAttribute(&value, attribute, device));
    };
    const bool answered = succeeds(cudaGetDevice(&device)) &&
        succeeds(cudaFuncGetAttributes(&compiled, kernel)) &&
        ask(cooperative, cudaDevAttrCooperativeLaunch) &&
        ask(processors, cudaDevAttrMultiProcessorCount) &&
        ask(most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    // mma.m16n8k16 exists from 8.0 on. A newer GPU may run code that was
    // compiled for an older one, which does not use it.
    if (!answered || cooperative == 0 || compiled.ptxVersion < 80 ||
        shared_bytes > most_shared) {
      return 0;
    }
    int blocks = 0;
    if (!succeeds(cudaFuncSetAttribute(
            kernel,
            cudaFuncAttributeMaxDynamicSharedMemorySize,
            shared_bytes)) ||
        !succeeds(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks, kernel, kThreads, shared_bytes))) {
      return 0;
    }
    return int64_t(blocks) * processors;
  }

  template <typename Args>
  void launch(const Args& args, int tiles, int64_t blocks, int shared_bytes) {
    void* arguments[] = {const_cast<Args*>(&args)};
    succeeds(cudaLaunchCooperativeKernel(
        kernel_of(args, tiles),
        dim3(static_cast<unsigned>(blocks)),
        dim3(kThreads),
        arguments,
        shared_bytes,
        stream));
  }
};

} // namespace

template <typename Args>
std::string
cuda_launch(const Args& args, cudaStream_t stream, int least_tiles) {
  return launch_with_fewest_tiles(CurrentGpu{stream}, args, least_tiles);
}

template std::string cuda_launch(const Forward<c10::Half>&, cudaStream_t, int);
template std::string
cuda_launch(const Forward<c10::BFloat16>&, cudaStream_t, int);
template std::string cuda_launch(const Backward<c10::Half>&, cudaStream_t, int);
template std::string
cuda_launch(const Backward<c10::BFloat16>&, cudaStream_t, int);

} // namespace lltm::recurrence
