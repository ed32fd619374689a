#include "masked_softmax.h"

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
Tensor masked_softmax(const Tensor& scores, const Tensor& mask) {
  static const auto schema =
      c10::Dispatcher::singleton().findSchemaOrThrow("my_ops::masked_softmax", "");
  return schema.typed<decltype(masked_softmax)>().call(scores, mask);
}

Tensor masked_softmax_backward(const Tensor& grad, const Tensor& scores, const Tensor& mask) {
  static const auto schema =
      c10::Dispatcher::singleton().findSchemaOrThrow("my_ops::masked_softmax_backward", "");
  return schema.typed<decltype(masked_softmax_backward)>().call(grad, scores, mask);
}

struct MaskedSoftmax : torch::autograd::Function<MaskedSoftmax> {
  static constexpr bool is_traceable = true; // by compiled autograd

  // Saves tensors only: a saved size would tie a compiled graph to it.
  static Tensor forward(AutogradContext* ctx, const Tensor& scores, const Tensor& mask) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({scores, mask});
    return masked_softmax(scores, mask);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    // The mask has no gradient.
    return {masked_softmax_backward(grads[0], saved[0], saved[1]), Tensor()};
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

Tensor masked_softmax_autograd(const Tensor& scores, const Tensor& mask) {
  check(scores, mask); // here too: fake tensors hide their devices from Meta
  return is_transformed(scores, mask) ? masked_softmax_formula(scores, mask)
                                      : MaskedSoftmax::apply(scores, mask);
}

Tensor masked_softmax_backward_autograd(
    const Tensor& grad, const Tensor& scores, const Tensor& mask) {
  check(grad, scores, mask);
  // Under create_graph=True autograd differentiates the gradients: it knows how to for ATen.
  const auto any = grad.requires_grad() || scores.requires_grad();
  if ((at::GradMode::is_enabled() && any) || is_transformed(grad, scores, mask)) {
    return masked_softmax_backward_formula(grad, scores, mask);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return masked_softmax_backward(grad, scores, mask);
}

} // namespace

TORCH_LIBRARY_IMPL(my_ops, Autograd, m) {
  m.impl("masked_softmax", masked_softmax_autograd);
  m.impl("masked_softmax_backward", masked_softmax_backward_autograd);
}

} // namespace my_ops
