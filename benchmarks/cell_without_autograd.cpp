// The cell's kernels as operators without autograd, as those of the stable ABI
// are: python_autograd.py puts autograd over them.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace {

constexpr char kForward[] = "lltm::_forward_with_gates";
constexpr char kBackward[] = "lltm::backward";

template <const char* name>
void call_below_autograd(
    const c10::OperatorHandle&,
    c10::DispatchKeySet,
    torch::jit::Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

template <const char* name>
torch::CppFunction kernel() {
  return torch::CppFunction::makeFromBoxedFunction<
      &call_below_autograd<name>>();
}

} // namespace

TORCH_LIBRARY(lltm_without_autograd, m) {
  m.def(
      "forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, "
      "Tensor old_cell) -> (Tensor, Tensor, Tensor)",
      torch::dispatch(c10::DispatchKey::CPU, kernel<kForward>()));
  m.def(
      "backward(Tensor grad_h, Tensor grad_cell, Tensor new_cell, "
      "Tensor gates, Tensor input, Tensor weights, Tensor old_h, "
      "bool[5] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      torch::dispatch(c10::DispatchKey::CPU, kernel<kBackward>()));
}
