#pragma once

#include "ops/lltm.h"

#include <ATen/core/Tensor.h>

#include <tuple>

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

// Gradients that are null are not wanted.
template <typename scalar_t>
struct GradientPointers {
  scalar_t* d_input;
  scalar_t* d_weights;
  scalar_t* d_bias;
  scalar_t* d_old_h; // of a sequence: of h0
  scalar_t* d_old_cell;
};

template <typename scalar_t>
GradientPointers<scalar_t> pointers_to(const BackwardResult& gradients) {
  return std::apply(
      [](const auto&... tensors) {
        return GradientPointers<scalar_t>{
            tensors.defined() ? tensors.template mutable_data_ptr<scalar_t>()
                              : nullptr...};
      },
      gradients);
}

} // namespace lltm
