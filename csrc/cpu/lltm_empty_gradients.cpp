#include "cpu/lltm_empty_gradients.h"

#include <ATen/EmptyTensor.h>

namespace lltm {

BackwardResult empty_gradients(
    const at::Tensor& computed,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& initial,
    OutputMask output_mask) {
  const bool nothing_to_sum = computed.numel() == 0;
  const auto empty = [&](bool wanted, at::IntArrayRef sizes) {
    if (!wanted) {
      return at::Tensor();
    }
    // lltm_forward.cpp says why it is not at::empty().
    at::Tensor memory = at::detail::empty_cpu(sizes, input.options());
    if (nothing_to_sum) {
      memory.zero_();
    }
    return memory;
  };
  return {
      empty(output_mask[0], input.sizes()),
      empty(output_mask[1], weights.sizes()),
      empty(output_mask[2], {weights.size(0)}),
      empty(output_mask[3], initial.sizes()),
      empty(output_mask[4], initial.sizes())};
}

} // namespace lltm
