// What a persistent recurrence on this GPU has to pay: launches, a barrier of
// the whole grid, an exchange inside a cluster. Prints a JSON object,
// microseconds each. Every wait is bounded: a probe that cannot end traps.

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

namespace cg = cooperative_groups;

namespace {

constexpr int kThreads = 256;
constexpr int kSteps = 1000;
constexpr int64_t kSpins = 1 << 24;
constexpr int kMaxBlocks = 128;
constexpr uint32_t kSentinel = 0xffffffffu;

#define CHECK(call)                   \
  do {                                \
    const cudaError_t error = (call); \
    if (error != cudaSuccess) {       \
      fprintf(                        \
          stderr,                     \
          "%s:%d: %s\n",              \
          __FILE__,                   \
          __LINE__,                   \
          cudaGetErrorString(error)); \
      exit(1);                        \
    }                                 \
  } while (false)

__device__ void trap_if(bool too_long) {
  if (too_long) {
    __trap();
  }
}

__global__ void empty_kernel() {}

__global__ void barrier_of_cooperative_groups() {
  const auto grid = cg::this_grid();
  for (int step = 0; step < kSteps; ++step) {
    grid.sync();
  }
}

// A counter that only grows: no reset, so one barrier a step.
__global__ void barrier_of_flags(unsigned* arrived) {
  for (unsigned step = 1; step <= kSteps; ++step) {
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived)
                   : "memory");
      unsigned seen = 0;
      for (int64_t spin = 0; seen < step * gridDim.x; ++spin) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(seen)
                     : "l"(arrived)
                     : "memory");
        trap_if(spin > kSpins);
      }
    }
    __syncthreads();
  }
}

// Each block stores 32 bytes a thread-quad at an address of the step's own, and
// polls those of all blocks until none holds the sentinel.
__global__ void exchange_by_polling(uint4* slices) {
  constexpr int kWords = 32; // uint4 of a block: 16 rows of 16 bf16 units
  const int all = gridDim.x * kWords;
  for (int step = 0; step < kSteps; ++step) {
    uint4* const of_step = slices + int64_t(step) * all;
    if (threadIdx.x < kWords) {
      const uint4 value = make_uint4(step, step, step, step);
      uint4* const to = of_step + blockIdx.x * kWords + threadIdx.x;
      asm volatile(
          "st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
          "r"(value.x),
          "r"(value.y),
          "r"(value.z),
          "r"(value.w)
          : "memory");
    }
    for (int i = threadIdx.x; i < all; i += kThreads) {
      uint4 value;
      int64_t spin = 0;
      do {
        asm volatile(
            "ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
            : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
            : "l"(of_step + i)
            : "memory");
        trap_if(++spin > kSpins);
      } while (value.x == kSentinel || value.y == kSentinel ||
               value.z == kSentinel || value.w == kSentinel);
    }
    // What follows in a recurrence needs all of them in the block.
    __syncthreads();
  }
}

// Each block writes its slice into the shared memory of all, twice buffered.
__global__ void exchange_by_cluster_barrier(uint32_t* sink) {
  constexpr int kWords = 128; // of a block: 16 rows of 16 bf16 units
  __shared__ uint32_t slices[2][16][kWords];
  const auto cluster = cg::this_cluster();
  const unsigned rank = cluster.block_rank();
  const unsigned blocks = cluster.num_blocks();
  cluster.sync();
  for (int step = 0; step < kSteps; ++step) {
    for (unsigned i = threadIdx.x; i < kWords * blocks; i += kThreads) {
      uint32_t* const peer =
          cluster.map_shared_rank(&slices[step % 2][rank][0], i / kWords);
      peer[i % kWords] = step;
    }
    cluster.sync();
  }
  if (slices[0][0][threadIdx.x % kWords] == kSentinel) {
    *sink = 1;
  }
  cluster.sync();
}

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void wait_for_phase(uint32_t mbarrier, uint32_t parity) {
  uint32_t done = 0;
  for (int64_t spin = 0; done == 0; ++spin) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], "
        "%2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(mbarrier), "r"(parity)
        : "memory");
    trap_if(spin > kSpins);
  }
}

// Each block pushes its slice to all; the bytes that arrive end the wait.
__global__ void exchange_by_mbarrier(uint32_t* sink) {
  constexpr int kWords = 128;
  __shared__ uint32_t slices[2][16][kWords];
  __shared__ alignas(8) uint64_t mbarriers[2];
  const auto cluster = cg::this_cluster();
  const unsigned rank = cluster.block_rank();
  const unsigned blocks = cluster.num_blocks();
  if (threadIdx.x < 2) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
                     shared_address(&mbarriers[threadIdx.x]))
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster.sync();
  for (int step = 0; step < kSteps; ++step) {
    const int buffer = step % 2;
    const uint32_t mbarrier = shared_address(&mbarriers[buffer]);
    if (threadIdx.x == 0) {
      asm volatile(
          "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
              mbarrier),
          "r"(blocks * kWords * 4)
          : "memory");
    }
    for (unsigned i = threadIdx.x; i < kWords * blocks; i += kThreads) {
      const unsigned peer = i / kWords;
      uint32_t to, remote_mbarrier;
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(to)
          : "r"(shared_address(&slices[buffer][rank][i % kWords])), "r"(peer));
      asm("mapa.shared::cluster.u32 %0, %1, %2;"
          : "=r"(remote_mbarrier)
          : "r"(mbarrier), "r"(peer));
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, "
          "[%2];" ::"r"(to),
          "r"(step),
          "r"(remote_mbarrier)
          : "memory");
    }
    wait_for_phase(mbarrier, (step / 2) % 2);
  }
  if (slices[0][0][threadIdx.x % kWords] == kSentinel) {
    *sink = 1;
  }
  cluster.sync();
}

// The least of five, in microseconds.
float microseconds(const std::function<void(cudaStream_t)>& run) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  run(stream);
  float least = 1e30f;
  for (int i = 0; i < 5; ++i) {
    CHECK(cudaEventRecord(begin, stream));
    run(stream);
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float milliseconds = 0;
    CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
    least = std::min(least, milliseconds * 1000);
  }
  CHECK(cudaEventDestroy(begin));
  CHECK(cudaEventDestroy(end));
  CHECK(cudaStreamDestroy(stream));
  return least;
}

bool first = true;

void print(const std::string& name, double value) {
  printf("%s\"%s\": %.4f", first ? "{" : ", ", name.c_str(), value);
  first = false;
}

void probe_launches() {
  const auto launch = [](cudaStream_t stream) {
    for (int i = 0; i < kSteps; ++i) {
      empty_kernel<<<kMaxBlocks, kThreads, 0, stream>>>();
    }
    CHECK(cudaGetLastError());
  };
  print("launch", microseconds(launch) / kSteps);
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch(stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&replay, graph, 0));
  print(
      "launch in a graph",
      microseconds([&](cudaStream_t on) {
        CHECK(cudaGraphLaunch(replay, on));
      }) / kSteps);
  CHECK(cudaGraphExecDestroy(replay));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
}

void launch_cooperative(
    const void* kernel,
    int blocks,
    void** arguments,
    cudaStream_t stream) {
  CHECK(cudaLaunchCooperativeKernel(
      kernel, blocks, kThreads, arguments, 0, stream));
}

void probe_grid(int blocks) {
  const auto with = " of " + std::to_string(blocks) + " blocks";
  print(
      "barrier of cooperative groups" + with,
      microseconds([&](auto stream) {
        launch_cooperative(
            reinterpret_cast<const void*>(barrier_of_cooperative_groups),
            blocks,
            nullptr,
            stream);
      }) / kSteps);
  unsigned* arrived;
  CHECK(cudaMalloc(&arrived, sizeof(unsigned)));
  print(
      "barrier of flags" + with,
      microseconds([&](auto stream) {
        CHECK(cudaMemsetAsync(arrived, 0, sizeof(unsigned), stream));
        void* arguments[] = {&arrived};
        launch_cooperative(
            reinterpret_cast<const void*>(barrier_of_flags),
            blocks,
            arguments,
            stream);
      }) / kSteps);
  CHECK(cudaFree(arrived));
  uint4* slices;
  const size_t bytes = size_t(kSteps) * blocks * 32 * sizeof(uint4);
  CHECK(cudaMalloc(&slices, bytes));
  const auto fill = microseconds([&](auto stream) {
    CHECK(cudaMemsetAsync(slices, 0xff, bytes, stream));
  });
  const auto both = microseconds([&](auto stream) {
    CHECK(cudaMemsetAsync(slices, 0xff, bytes, stream));
    void* arguments[] = {&slices};
    launch_cooperative(
        reinterpret_cast<const void*>(exchange_by_polling),
        blocks,
        arguments,
        stream);
  });
  print(
      "exchange of 512 bytes a block by polling" + with,
      (both - fill) / kSteps);
  CHECK(cudaFree(slices));
}

cudaLaunchConfig_t cluster_config(
    int blocks,
    int size,
    size_t shared_bytes,
    cudaLaunchAttribute* attribute) {
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = size;
  attribute->val.clusterDim.y = 1;
  attribute->val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

__global__ void with_much_shared_memory(uint32_t* sink) {
  extern __shared__ uint32_t memory[];
  sink[threadIdx.x] = memory[threadIdx.x];
}

// How many clusters with 200 KB of shared memory for each block there is room
// for.
void probe_occupancy(int size) {
  constexpr int kBytes = 200 * 1024;
  CHECK(cudaFuncSetAttribute(
      with_much_shared_memory,
      cudaFuncAttributeMaxDynamicSharedMemorySize,
      kBytes));
  CHECK(cudaFuncSetAttribute(
      with_much_shared_memory,
      cudaFuncAttributeNonPortableClusterSizeAllowed,
      1));
  cudaLaunchAttribute attribute;
  const auto config = cluster_config(kMaxBlocks, size, kBytes, &attribute);
  int clusters = 0;
  CHECK(cudaOccupancyMaxActiveClusters(
      &clusters, with_much_shared_memory, &config));
  print("clusters of " + std::to_string(size) + " at a time", clusters);
}

void probe_cluster(const char* name, void (*kernel)(uint32_t*), int size) {
  CHECK(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  uint32_t* sink;
  CHECK(cudaMalloc(&sink, sizeof(uint32_t)));
  const auto time = microseconds([&](cudaStream_t stream) {
    cudaLaunchAttribute attribute;
    auto config = cluster_config(size, size, 0, &attribute);
    config.stream = stream;
    CHECK(cudaLaunchKernelEx(&config, kernel, sink));
  });
  print(
      "exchange of 512 bytes a block by " + std::string(name) + " of " +
          std::to_string(size),
      time / kSteps);
  CHECK(cudaFree(sink));
}

} // namespace

int main() {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  probe_launches();
  for (const int blocks : {64, kMaxBlocks}) {
    if (blocks <= properties.multiProcessorCount) {
      probe_grid(blocks);
    }
  }
  if (properties.major >= 9) {
    for (const int size : {8, 16}) {
      probe_occupancy(size);
      probe_cluster("cluster barrier", exchange_by_cluster_barrier, size);
      probe_cluster("mbarrier in clusters", exchange_by_mbarrier, size);
    }
  }
  printf("}\n");
  return 0;
}
