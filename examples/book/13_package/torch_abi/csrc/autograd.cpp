#include "swiglu.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace my_ops {
namespace {
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Calls the operator, through the dispatcher.
Tensor swiglu(const Tensor& gate, const Tensor& value) {
  static const auto schema = c10::Dispatcher::singleton().findSchemaOrThrow("my_ops::swiglu", "");
  return schema.typed<decltype(swiglu)>().call(gate, value);
}

Gradients swiglu_backward(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  static const auto schema =
      c10::Dispatcher::singleton().findSchemaOrThrow("my_ops::swiglu_backward", "");
  return schema.typed<decltype(swiglu_backward)>().call(grad, gate, value);
}

struct SwiGLU : torch::autograd::Function<SwiGLU> {
  static constexpr bool is_traceable = true; // by compiled autograd

  // Saves tensors only: a saved size would tie a compiled graph to it.
  static Tensor forward(AutogradContext* ctx, const Tensor& gate, const Tensor& value) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, value});
    return swiglu(gate, value);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    auto [d_gate, d_value] = swiglu_backward(grads[0], saved[0], saved[1]);
    return {d_gate, d_value};
  }
};

// torch::autograd::Function raises under the transforms of torch.func and under
// forward-mode AD. The formulas work with both.
template <typename... Tensors>
bool is_transformed(const Tensors&... tensors) {
  return c10::impl::tls_local_dispatch_key_set().included_.has(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      (tensors._fw_grad(/*level=*/0).defined() || ...);
}

Tensor swiglu_autograd(const Tensor& gate, const Tensor& value) {
  check(gate, value); // here too: fake tensors hide their devices from Meta
  return is_transformed(gate, value) ? swiglu_formula(gate, value) : SwiGLU::apply(gate, value);
}

Gradients swiglu_backward_autograd(const Tensor& grad, const Tensor& gate, const Tensor& value) {
  check(grad, gate, value);
  // Under create_graph=True autograd differentiates the gradients: it knows how to for ATen.
  const auto any = grad.requires_grad() || gate.requires_grad() || value.requires_grad();
  if ((at::GradMode::is_enabled() && any) || is_transformed(grad, gate, value)) {
    return swiglu_backward_formula(grad, gate, value);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return swiglu_backward(grad, gate, value);
}

} // namespace

TORCH_LIBRARY_IMPL(my_ops, Autograd, m) {
  m.impl("swiglu", swiglu_autograd);
  m.impl("swiglu_backward", swiglu_backward_autograd);
}

} // namespace my_ops
