#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_sequence.h"

#include <torch/library.h>

// Meta: shapes only. Outputs are contiguous whatever the strides of the
// arguments, as the kernels make them. They do not depend on the values of
// batch_sizes, which a fake tensor does not have.
namespace lltm {

namespace {

template <auto op, typename Arguments = ArgumentsOf<op>>
auto meta_kernel(const Arguments& a) -> decltype(op(a)) {
  const auto sizes = check_arguments(a);
  decltype(op(a)) results;
  for_each_result(a, results, [&](at::Tensor& result, const Shape& shape) {
    result = a.input.new_empty_symint(sizes.of(shape));
  });
  return results;
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, Meta, m) {
  m.impl("forward", as_kernel<meta_kernel<forward>>());
  m.impl("_forward_with_gates", as_kernel<meta_kernel<_forward_with_gates>>());
  m.impl("backward", as_kernel<meta_kernel<backward>>());
  m.impl("sequence_forward", as_kernel<meta_kernel<sequence_forward>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<meta_kernel<_sequence_forward_with_gates>>());
  m.impl("sequence_backward", as_kernel<meta_kernel<sequence_backward>>());
}

} // namespace lltm
