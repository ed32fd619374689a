#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_checks.h"

#include <torch/library.h>

// Meta: shapes only. Outputs are contiguous whatever the strides of the
// arguments, as the kernels make them.
namespace lltm {

namespace {

at::Tensor empty_like_contiguous(const at::Tensor& tensor) {
  return tensor.new_empty_symint(tensor.sym_sizes());
}

ForwardResult forward_meta(const ForwardArguments& a) {
  check_arguments(a);
  return {empty_like_contiguous(a.old_h), empty_like_contiguous(a.old_cell)};
}

ForwardWithGatesResult forward_with_gates_meta(const ForwardArguments& a) {
  auto [new_h, new_cell] = forward_meta(a);
  return {
      std::move(new_h),
      std::move(new_cell),
      a.input.new_empty_symint({a.input.sym_size(0), a.weights.sym_size(0)})};
}

BackwardResult backward_meta(const BackwardArguments& a) {
  check_arguments(a);
  const auto if_asked = [&](size_t i, const at::Tensor& like) {
    return a.output_mask[i] ? empty_like_contiguous(like) : at::Tensor();
  };
  return {
      if_asked(0, a.input),
      if_asked(1, a.weights),
      a.output_mask[2] ? a.weights.new_empty_symint({a.weights.sym_size(0)})
                       : at::Tensor(),
      if_asked(3, a.old_h),
      if_asked(4, a.new_cell)};
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("forward", as_kernel<forward_meta>());
  m.impl("_forward_with_gates", as_kernel<forward_with_gates_meta>());
  m.impl("backward", as_kernel<backward_meta>());
}

} // namespace lltm
