#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "lltm_function.h"

namespace {

// A transform of torch.func or a tangent of forward-mode AD: torch::autograd::Function has no rule
// for them, and raises.
bool is_transformed(at::TensorList arguments) {
  auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  bool transformed = keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  for (const auto& tensor : arguments) {
    transformed |= tensor._fw_grad(/*level=*/0).defined();
  }
  return transformed;
}

lltm::State forward_autograd(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  std::array<at::Tensor, 5> arguments{input, weights, bias, old_h, old_cell};
  if (is_transformed(arguments)) {
    lltm::log_call("Autograd", "forward, transformed");
    lltm::check_forward(input, weights, bias, old_h, old_cell);
    return lltm::formula(input, weights, bias, old_h, old_cell);
  }
  bool requires_grad = false;
  for (const auto& tensor : arguments) {
    requires_grad |= tensor.requires_grad();
  }
  if (!requires_grad || !at::GradMode::is_enabled()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return lltm::forward(input, weights, bias, old_h, old_cell);
  }
  auto results = lltm::Function::apply(input, weights, bias, old_h, old_cell);
  return {results[0], results[1]};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl("forward", forward_autograd);
  m.impl("backward", torch::autograd::autogradNotImplementedFallback());
}
