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
// as more rows. The composite formulas would take longer: on Zen 5 with one
// thread, 8 calls of 1x32x128 1.4 times (16 steps: 4.1), 32 calls of
// 16x256x512 2.3 times (2.4). They run where a tensor without a batch is
// mapped, such as weights, and become batched GEMMs.
namespace lltm {

namespace {

// -1 if none is, as in weights and in packed sequences.
int64_t batch_dim(const Shape& shape) {
  const auto* const found = std::find(shape.begin(), shape.end(), Dim::kBatch);
  return found == shape.end() ? -1 : found - shape.begin();
}

// Folds what the innermost level of vmap maps into the batch, and results back.
class MappedBatch {
 public:
  template <typename Arguments>
  explicit MappedBatch(const Arguments& a) {
    const auto dim = batch_dim(a.rows(Dim::kInputFeatures));
    can_fold_ = dim >= 0; // packed sequences cannot
    for_each_tensor(a, [&](const Argument<at::Tensor>& argument) {
      if (const auto* mapped =
              at::functorch::maybeGetBatchedImpl(argument.value)) {
        level_ = std::max(level_, mapped->level());
      }
    });
    for_each_tensor(a, [&](const Argument<at::Tensor>& argument) {
      if (const auto* mapped = mapped_here(argument.value)) {
        mapped_ = mapped->value().sym_size(mapped->bdim());
        can_fold_ = can_fold_ && batch_dim(argument.shape) >= 0;
      }
    });
    if (can_fold_) {
      batch_ = a.input.sym_size(dim);
    }
  }

  bool can_fold() const {
    return can_fold_;
  }

  at::Tensor fold(const Argument<at::Tensor>& argument) const {
    const auto dim = batch_dim(argument.shape);
    if (dim < 0) {
      return argument.value;
    }
    if (const auto* mapped = mapped_here(argument.value)) {
      return mapped->value().movedim(mapped->bdim(), dim).flatten(dim, dim + 1);
    }
    std::vector<c10::SymInt> sizes(argument.value.dim() + 1, -1);
    sizes[dim] = mapped_;
    return argument.value.unsqueeze(dim).expand_symint(sizes).flatten(
        dim, dim + 1);
  }

  // The last but one dimension of each result is the batch.
  at::Tensor unfold(const at::Tensor& result) const {
    const auto dim = result.dim() - 2;
    return at::functorch::makeBatched(
        result.unflatten_symint(dim, {mapped_, batch_}), dim, level_);
  }

 private:
  const at::functorch::BatchedTensorImpl* mapped_here(
      const at::Tensor& tensor) const {
    const auto* mapped = at::functorch::maybeGetBatchedImpl(tensor);
    return mapped != nullptr && mapped->level() == level_ ? mapped : nullptr;
  }

  int64_t level_ = 0;
  c10::SymInt mapped_;
  c10::SymInt batch_;
  bool can_fold_;
};

template <auto op, typename Arguments = ArgumentsOf<op>>
auto vmap_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_arguments(arguments);
  const MappedBatch batch(arguments);
  if (!batch.can_fold()) {
    return composite_forward(arguments);
  }
  const c10::impl::ExcludeDispatchKeyGuard below_vmap(
      c10::DispatchKey::FuncTorchBatched);
  auto results = call_with_mapped_tensors(
      arguments,
      [&](const auto& argument) { return batch.fold(argument); },
      op);
  std::apply(
      [&](auto&... each) { ((each = batch.unfold(each)), ...); }, results);
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
