// What the CUDA kernels compute, on the host: the operators of
// test_cuda_without_gpu.py. Pointwise kernels run thread by thread, the
// recurrence in the emulator.

#include "cuda/lltm_impl.h"
#include "cuda/lltm_sequence_backward.h"
#include "cuda/lltm_sequence_forward.h"
#include "ops/dispatch.h"
#include "recurrence/emulated_backend.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

namespace {

// The GPU that the host pretends to be. It takes so many launches of the
// recurrence, and refuses those after. It answers so many questions.
struct {
  int64_t processors = 0; // 0: the recurrence is off
  int64_t shared_bytes = 0;
  int64_t accepted = 0;
  int64_t least_tiles = 1;
  int64_t answers = 0;
} gpu;

struct Launch {
  int64_t blocks;
  int64_t shared_bytes;
  int64_t stream;
};
std::vector<Launch> launches;

// The addresses of the weights for h that each product took, and the elements
// between their rows.
std::vector<std::vector<int64_t>> products;

struct PretendedGpu : backend::EmulatedGpu {
  int64_t stream;

  template <typename Args>
  int64_t resident_blocks(const Args& args, int tiles, int shared_bytes) {
    if (gpu.answers-- <= 0) {
      error = "cudaErrorUnknown: unknown error";
      return 0;
    }
    return EmulatedGpu::resident_blocks(args, tiles, shared_bytes);
  }

  template <typename Args>
  void launch(const Args& args, int tiles, int64_t blocks, int shared_bytes) {
    if (gpu.accepted-- <= 0) {
      error = "cudaErrorNotPermitted: operation not permitted";
      return;
    }
    launches.push_back({blocks, shared_bytes, stream});
    EmulatedGpu::launch(args, tiles, blocks, shared_bytes);
  }
};

struct HostDevice {
  // So that a few steps are several chunks.
  static constexpr int64_t kBytesOfGates = 4096;

  struct Guard {
    explicit Guard(c10::Device) {}
  };
  using Stream = int64_t;

  static Stream stream() {
    return 7; // as good as any, and not the default
  }

  template <typename Body>
  static void launch(
      lltm::Grid grid,
      Stream stream,
      int64_t rows,
      int64_t columns,
      const Body& body) {
    TORCH_CHECK(grid.rows <= 65535, "a GPU refuses a grid of so many rows");
    launches.push_back({int64_t(grid.rows) * grid.columns, 0, stream});
    for (unsigned y = 0; y < grid.rows; ++y) {
      for (unsigned x = 0; x < grid.columns; ++x) {
        for (int thread = 0; thread < lltm::kPointwiseThreads; ++thread) {
          lltm::for_each_of_thread(grid, {x, y}, thread, rows, columns, body);
        }
      }
    }
  }

  static void
  mm_out(at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
    products.push_back(
        {reinterpret_cast<int64_t>(b.const_data_ptr()),
         std::max(b.stride(0), b.stride(1))});
    out.copy_(a.to(out.scalar_type()).mm(b.to(out.scalar_type())));
  }

  static bool recurrence_is_on() {
    return gpu.processors > 0;
  }

  static void fill_sentinel(const at::Tensor& tensor) {
    std::memset(tensor.mutable_data_ptr(), 0xff, tensor.nbytes());
  }

  template <typename Args>
  static std::string launch_recurrence(const Args& args, Stream stream) {
    const PretendedGpu pretended{
        {.seed = static_cast<uint32_t>(launches.size()),
         .processors = gpu.processors,
         .most_shared_bytes = static_cast<int>(gpu.shared_bytes)},
        stream};
    return lltm::recurrence::launch_with_fewest_tiles(
        pretended, args, static_cast<int>(gpu.least_tiles));
  }
};

// How often the grid comes by each element.
at::Tensor visits(int64_t rows, int64_t columns) {
  auto counts = at::zeros({rows, columns}, at::kChar);
  auto* data = counts.mutable_data_ptr<int8_t>();
  lltm::launch_pointwise<HostDevice>(
      rows, columns, [&](int64_t row, int64_t column) {
        ++data[row * columns + column];
      });
  return counts;
}

// Runs the pointwise kernels of float for a row of one unit. It is the only row
// in memory, and no index of 32 bits reaches it: a wrong one ends the process.
void run_far_row() {
  constexpr int64_t kRow = int64_t(1) << 32;
  std::vector<float> row(3);
  std::vector<uint8_t> reset(1);
  float* const gates = row.data() - 3 * kRow;
  float* const unit = row.data() - kRow;
  const lltm::RowResets resets{reset.data() - kRow, kRow + 1};
  lltm::ForwardUnit<float, true>{{}, 1, gates, unit, unit, unit}(kRow, 0);
  lltm::BackwardUnit<float>{{}, 1, unit, unit, unit, gates, gates, unit}(
      kRow, 0);
  lltm::SequenceForwardUnit<float, true>{
      {}, 1, kRow + 1, gates, gates, unit, unit, unit, unit, resets}(kRow, 0);
  lltm::SequenceBackwardUnit<float>{
      {}, 1, kRow + 1, unit, unit, unit, gates, gates, unit, unit, resets}(
      kRow, 0);
}

bool is_reset(const at::Tensor& resets, int64_t rows, int64_t row) {
  return lltm::RowResets{lltm::bytes_or_null(resets), rows}[row];
}

void pretend(
    int64_t processors,
    int64_t shared_bytes,
    int64_t accepted,
    int64_t least_tiles,
    int64_t answers) {
  gpu = {processors, shared_bytes, accepted, least_tiles, answers};
  launches.clear();
  products.clear();
  for (auto& count : lltm::launches) {
    count = 0;
  }
}

std::vector<int64_t> recurrence_launches() {
  return {lltm::launches.begin(), lltm::launches.end()};
}

std::vector<std::vector<int64_t>> products_so_far() {
  return products;
}

// Since the last call of pretend: blocks, bytes of shared memory, stream.
std::vector<std::vector<int64_t>> launches_so_far() {
  std::vector<std::vector<int64_t>> rows;
  for (const auto& [blocks, shared_bytes, stream] : launches) {
    rows.push_back({blocks, shared_bytes, stream});
  }
  return rows;
}

// With the schema of an operator of the library.
template <auto function>
void define(torch::Library& m, const std::string& name, const char* like) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(like, "");
  m.def(op.schema().cloneWithName("lltm_on_host::" + name, ""));
  m.impl(name.c_str(), lltm::as_kernel<function>());
}

} // namespace

TORCH_LIBRARY(lltm_on_host, m) {
  m.def("visits(int rows, int columns) -> Tensor", visits);
  m.def("run_far_row() -> ()", run_far_row);
  m.def("is_reset(Tensor resets, int rows, int row) -> bool", is_reset);
  m.def(
      "pretend(int processors, int shared_bytes, int accepted, "
      "int least_tiles, int answers) -> ()",
      pretend);
  m.def("recurrence_launches() -> int[]", recurrence_launches);
  m.def("launches() -> int[][]", launches_so_far);
  m.def("products() -> int[][]", products_so_far);
  define<lltm::forward_impl<HostDevice, false>>(
      m, "forward", "lltm::_forward_with_gates");
  define<lltm::forward_impl<HostDevice, true>>(
      m, "forward_with_gates", "lltm::_forward_with_gates");
  define<lltm::backward_impl<HostDevice>>(m, "backward", "lltm::backward");
  define<lltm::sequence_forward_impl<HostDevice, false>>(
      m, "sequence_forward", "lltm::_sequence_forward_with_gates");
  define<lltm::sequence_forward_impl<HostDevice, true>>(
      m, "sequence_forward_with_gates", "lltm::_sequence_forward_with_gates");
  define<lltm::sequence_backward_impl<HostDevice>>(
      m, "sequence_backward", "lltm::sequence_backward");
}
