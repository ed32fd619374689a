#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

// What the autograd kernels ask before they apply a torch::autograd::Function.
namespace lltm {

template <typename... Tensors>
bool any_requires_grad(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.requires_grad() || ...);
}

// torch::autograd::Function supports neither functorch's transforms (it
// raises) nor forward-mode AD (it returns a wrong tangent). The dispatch key is
// the test for a transform: functorchTLSAccessor() is set under AOTAutograd
// too.
template <typename... Tensors>
bool needs_composite(const Tensors&... tensors) {
  return c10::impl::tls_local_dispatch_key_set().included_.has(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      (tensors._fw_grad(/*level=*/0).defined() || ...);
}

} // namespace lltm
