#include "../check.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/core/Dispatch_v2.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

namespace my_ops {
namespace {
// Half types are computed in float, and rounded once.
template <typename scalar_t>
using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

// One past the last byte of the tensor, if it has any.
const char* end_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t k = 0; k < tensor.dim(); ++k) {
    last += (tensor.size(k) - 1) * tensor.stride(k);
  }
  return static_cast<const char*>(tensor.const_data_ptr()) + (last + 1) * tensor.element_size();
}

// Whether it is sure that no two elements lie at one place: each stride passes over all that the
// smaller ones reach.
bool has_own_elements(const Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> steps;
  for (int64_t k = 0; k < tensor.dim(); ++k) {
    steps.emplace_back(tensor.stride(k), tensor.size(k));
  }
  std::sort(steps.begin(), steps.end());
  int64_t reached = 0;
  for (const auto& [stride, size] : steps) {
    if (size > 1 && stride <= reached) {
      return false;
    }
    reached += stride * (size - 1);
  }
  return true;
}

// _ema_update.py says the same of fake tensors, but for where they lie in memory.
void check(const char* op, const Tensor& state, const Tensor& input) {
  check_type(op, "state", state);
  check_like(op, "input", input, state.scalar_type(), "state", state);
  if (state.numel() == 0) {
    return;
  }
  if (!has_own_elements(state)) {
    refuse(op, "state to have memory of its own for each element, but got an expanded one");
  }
  if (state.const_data_ptr() < end_of(input) && input.const_data_ptr() < end_of(state)) {
    refuse(op, "input to share no memory with state, but it does: clone it");
  }
}

void ema_update_kernel(Tensor state, const Tensor& input, double decay) {
  check("my_ops::ema_update_", state, input);
  // A copy of what is not contiguous. That of the state is written, so it is copied back.
  const auto state_ = torch::stable::contiguous(state), input_ = torch::stable::contiguous(input);
  THO_DISPATCH_V2(
      state.scalar_type(), "ema_update_", AT_WRAP([&] {
        const auto s = state_.mutable_data_ptr<scalar_t>();
        const auto x = input_.const_data_ptr<scalar_t>();
        const opmath_t<scalar_t> kept = decay;
        torch::stable::parallel_for(0, state.numel(), 8192, [&](int64_t begin, int64_t end) {
          for (auto i = begin; i < end; ++i) {
            s[i] = s[i] * kept + x[i] * (1 - kept);
          }
        });
      }),
      AT_FLOATING_TYPES, ScalarType::Half, ScalarType::BFloat16);
  if (!state.is_contiguous()) {
    torch::stable::copy_(state, state_);
  }
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("ema_update_", TORCH_BOX(&ema_update_kernel));
}

} // namespace my_ops
