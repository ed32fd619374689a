#pragma once

#include "ops/lltm.h"

#include <ATen/core/Tensor.h>

namespace lltm {

// Memory for the gradients that output_mask asks for: of input, weights, bias,
// and of h and the cell state, which have the sizes of initial. The gradients
// are zeros if computed is empty, because the kernels then write none of them.
BackwardResult empty_gradients(
    const at::Tensor& computed,
    const at::Tensor& input,
    const at::Tensor& weights,
    const at::Tensor& initial,
    OutputMask output_mask);

template <typename scalar_t>
scalar_t* pointer_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<scalar_t>() : nullptr;
}

} // namespace lltm
