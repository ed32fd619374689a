#include "../kernel.h"
#include "loop.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

namespace my_ops {
namespace {
struct ForEach {
  template <typename Body>
  void operator()(int64_t size, const Body& body) const {
    at::parallel_for(
        0, size, /*grain_size=*/8192, [&](int64_t begin, int64_t end) { loop(begin, end, body); });
  }
};

} // namespace

TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("swiglu", swiglu_kernel<ForEach>);
  m.impl("swiglu_backward", swiglu_backward_kernel<ForEach>);
}

} // namespace my_ops
