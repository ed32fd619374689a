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

// The gates come last, so results may be without them.
std::array<Shape, 3> shapes_of_results(const ForwardArguments& a) {
  return {kShapeOfState, kShapeOfState, a.row_shape(Dim::kGateUnits)};
}

std::array<Shape, 5> shapes_of_results(const SequenceForwardArguments& a) {
  const auto states = a.row_shape(Dim::kStateSize);
  const auto gates = a.row_shape(Dim::kGateUnits);
  return {states, states, kShapeOfState, kShapeOfState, gates};
}

// The gradients that output_mask asks for.
template <typename Arguments>
std::array<Shape, 5> shapes_of_results(const Arguments& a) {
  return {
      a.row_shape(Dim::kInputFeatures),
      kShapeOfWeights,
      kShapeOfBias,
      kShapeOfState,
      kShapeOfState};
}

template <auto op, typename Arguments = ArgumentsOf<op>>
auto meta_kernel(const Arguments& a) -> decltype(op(a)) {
  const auto sizes = check_arguments(a);
  const auto shapes = shapes_of_results(a);
  decltype(op(a)) results;
  size_t i = 0;
  const auto make = [&](at::Tensor& result) {
    bool wanted = true;
    if constexpr (requires { a.output_mask; }) {
      wanted = a.output_mask[i];
    }
    if (wanted) {
      result = a.input.new_empty_symint(sizes.of(shapes[i]));
    }
    ++i;
  };
  std::apply([&](auto&... each) { (make(each), ...); }, results);
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
