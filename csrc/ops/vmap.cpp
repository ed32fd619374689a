#include "ops/autocast.h"
#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_composite.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

// The vmap kernels fold a mapped dimension of input and state into the batch,
// as more rows, which packed sequences do not have. The composite formulas
// would take longer: on Zen 5 with one thread, 8 calls of 1x32x128 1.4 times
// (16 steps: 4.1), 32 calls of 16x256x512 2.3 times (2.4). They run where a
// tensor without a batch is mapped, such as weights, and become batched GEMMs.
namespace lltm {

namespace {

// -1 if none is, as in weights and in packed sequences.
int64_t batch_dim(const Shape& shape) {
  const auto* const found = std::find(shape.begin(), shape.end(), Dim::kBatch);
  return found == shape.end() ? -1 : found - shape.begin();
}

using at::functorch::maybeGetBatchedImpl;

// What the innermost level of vmap maps.
struct Mapped {
  int64_t level = 0; // nothing is mapped
  c10::SymInt size;
  bool all_have_a_batch = true;

  template <typename Arguments>
  explicit Mapped(const Arguments& arguments) {
    for_each_tensor(arguments, [&](const Argument<at::Tensor>& argument) {
      const auto* mapped = maybeGetBatchedImpl(argument.value);
      if (mapped == nullptr || mapped->level() < level) {
        return;
      }
      if (mapped->level() > level) {
        level = mapped->level();
        all_have_a_batch = true;
      }
      all_have_a_batch = all_have_a_batch && batch_dim(argument.shape) >= 0;
      size = mapped->value().sym_size(mapped->bdim());
    });
  }

  const at::functorch::BatchedTensorImpl* of_level(
      const at::Tensor& tensor) const {
    const auto* mapped = maybeGetBatchedImpl(tensor);
    return mapped != nullptr && mapped->level() == level ? mapped : nullptr;
  }

  at::Tensor fold(const Argument<at::Tensor>& argument) const {
    const auto dim = batch_dim(argument.shape);
    if (dim < 0) {
      return argument.value;
    }
    if (const auto* mapped = of_level(argument.value)) {
      return mapped->value().movedim(mapped->bdim(), dim).flatten(dim, dim + 1);
    }
    std::vector<c10::SymInt> sizes(argument.value.dim() + 1, -1);
    sizes[dim] = size;
    return argument.value.unsqueeze(dim).expand_symint(sizes).flatten(
        dim, dim + 1);
  }
};

template <auto op, typename Arguments = ArgumentsOf<op>>
auto vmap_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_arguments(arguments);
  const auto dim = batch_dim(arguments.row_shape(Dim::kInputFeatures));
  const Mapped mapped(arguments);
  if (dim < 0 || mapped.level == 0 || !mapped.all_have_a_batch) {
    return composite_forward(arguments);
  }
  const auto batch = arguments.input.sym_size(dim);
  const c10::impl::ExcludeDispatchKeyGuard below_vmap(
      c10::DispatchKey::FuncTorchBatched);
  auto results = call_with_replaced_tensors(
      arguments,
      [&](const Argument<at::Tensor>& argument) {
        return mapped.fold(argument);
      },
      op);
  const auto unfold = [&](at::Tensor& result) {
    const auto dim = result.dim() - 2; // the batch of each result
    result = at::functorch::makeBatched(
        result.unflatten_symint(dim, {mapped.size, batch}), dim, mapped.level);
  };
  std::apply([&](auto&... each) { (unfold(each), ...); }, results);
  return results;
}

} // namespace

// vmap comes before autocast in the dispatch order, so what goes forward is
// cast here.
TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl("forward", as_kernel<autocast_kernel<vmap_kernel<forward>>>());
  m.impl(
      "sequence_forward",
      as_kernel<autocast_kernel<vmap_kernel<sequence_forward>>>());
}

} // namespace lltm
