#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

// What the autograd kernels ask around a torch::autograd::Function.
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

// The gradient of an output; nothing arrives for one that nobody used.
inline at::Tensor defined_or_zeros(
    const at::Tensor& grad,
    const at::Tensor& output) {
  return grad.defined() ? grad : at::zeros_like(output);
}

} // namespace lltm
