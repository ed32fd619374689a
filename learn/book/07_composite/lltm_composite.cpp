#include <torch/library.h>

#include "lltm_formula.h"

namespace {

lltm::State forward_composite(
    const at::Tensor& input, const at::Tensor& weights, const at::Tensor& bias,
    const at::Tensor& old_h, const at::Tensor& old_cell) {
  lltm::log_call("FuncTorchBatched", "forward");
  lltm::check_forward(input, weights, bias, old_h, old_cell);
  return lltm::formula(input, weights, bias, old_h, old_cell);
}

} // namespace

// vmap maps each operator of the formula.
TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl("forward", forward_composite);
}
