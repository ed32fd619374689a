#pragma once

#include "cuda/recurrence/cuda_launch.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>

// How check.cpp runs kernels on a GPU.
namespace backend {

// Arguments have to begin where an allocation does.
constexpr bool kFarRows = false;

struct Plants {
  bool set(const std::string&) {
    return false;
  }
};

inline void require_success(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(cudaGetErrorString(error));
  }
}

struct Allocation {
  size_t bytes;
  char* on_device;
};

// By where they begin on the host. Each has a twin on the GPU, whose bounds
// memcheck knows: managed memory is not to be had everywhere.
inline std::map<char*, Allocation>& allocations() {
  static std::map<char*, Allocation> all;
  return all;
}

inline void* allocate(size_t bytes) {
  auto* const data = static_cast<char*>(std::malloc(bytes));
  char* on_device = nullptr;
  require_success(cudaMalloc(&on_device, bytes));
  allocations()[data] = {bytes, on_device};
  return data;
}

inline void release(void* data) {
  cudaFree(allocations().at(static_cast<char*>(data)).on_device);
  allocations().erase(static_cast<char*>(data));
  std::free(data);
}

template <typename T>
void to_device(T*& pointer) {
  if (pointer != nullptr) {
    auto* const host =
        reinterpret_cast<char*>(const_cast<std::remove_const_t<T>*>(pointer));
    pointer = reinterpret_cast<T*>(allocations().at(host).on_device);
  }
}

inline void copy_all(cudaMemcpyKind kind) {
  for (const auto& [host, allocation] : allocations()) {
    const bool down = kind == cudaMemcpyDeviceToHost;
    require_success(cudaMemcpy(
        down ? host : allocation.on_device,
        down ? allocation.on_device : host,
        allocation.bytes,
        kind));
  }
}

template <typename Args>
void run(const Args& args, int tiles) {
  copy_all(cudaMemcpyHostToDevice);
  const auto why_not = lltm::recurrence::cuda_launch(args, nullptr, tiles);
  if (!why_not.empty()) {
    throw std::runtime_error("it was not launched: " + why_not);
  }
  require_success(cudaDeviceSynchronize());
  copy_all(cudaMemcpyDeviceToHost);
}

template <typename scalar_t>
void run_recurrence(
    lltm::recurrence::Forward<scalar_t> args,
    int tiles,
    uint32_t,
    const Plants&) {
  to_device(args.weights);
  to_device(args.resets);
  to_device(args.h0);
  to_device(args.cell);
  to_device(args.products);
  to_device(args.output);
  to_device(args.cells);
  run(args, tiles);
}

template <typename scalar_t>
void run_recurrence(
    lltm::recurrence::Backward<scalar_t> args,
    int tiles,
    uint32_t,
    const Plants&) {
  to_device(args.weights);
  to_device(args.resets);
  to_device(args.gates);
  to_device(args.cells);
  to_device(args.grad_output);
  to_device(args.grad_cells);
  to_device(args.d_preactivations);
  to_device(args.d_h0);
  to_device(args.d_c0);
  run(args, tiles);
}

} // namespace backend
