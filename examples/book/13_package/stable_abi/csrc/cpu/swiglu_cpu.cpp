#include "../kernel.h"
#include "loop.h"

namespace my_ops {
namespace {
struct ForEach {
  template <typename Body>
  void operator()(const Tensor& like, const Body& body) const {
    torch::stable::parallel_for(
        0, like.numel(), /*grain_size=*/8192,
        [&](int64_t begin, int64_t end) { loop(begin, end, body); });
  }
};

} // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("swiglu_forward", TORCH_BOX(&swiglu_forward_kernel<ForEach>));
  m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward_kernel<ForEach>));
}

} // namespace my_ops
