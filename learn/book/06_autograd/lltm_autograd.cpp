#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include "lltm_function.h"

namespace {

lltm::State forward_autograd(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  auto results = lltm::Function::apply(input, weights, bias, old_h, old_cell);
  return {results[0], results[1]};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Autograd, m) {
  m.impl("forward", forward_autograd);
  // Without this line PyTorch would differentiate the operators inside of backward's kernel, and
  // would take the gates for constants.
  m.impl("backward", torch::autograd::autogradNotImplementedFallback());
}
