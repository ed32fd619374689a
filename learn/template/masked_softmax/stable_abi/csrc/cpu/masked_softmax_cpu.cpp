#include "../masked_softmax_kernel.h"
#include "loop.h"

namespace my_ops {
namespace {
struct ForEach {
  template <typename Body>
  void operator()(const Tensor&, const Rows& rows, const Body& body) const {
    // In elements, 8192: for less, another thread takes longer to start.
    const auto grain_size = std::max<int64_t>(8192 / rows.columns, 1);
    torch::stable::parallel_for(0, rows.count(), grain_size, [&](int64_t begin, int64_t end) {
      loop(rows, begin, end, body);
    });
  }
};

} // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("masked_softmax_forward", TORCH_BOX(&masked_softmax_forward_kernel<ForEach>));
  m.impl("masked_softmax_backward", TORCH_BOX(&masked_softmax_backward_kernel<ForEach>));
}

} // namespace my_ops
