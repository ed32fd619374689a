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

// The vmap kernels fold a mapped dimension of input and state into the batch,
// as more rows. Tensors without a batch, such as weights, cannot take it: if
// one of them is mapped, the composite formulas run, and become batched GEMMs.
namespace lltm {

namespace {

// Folds what the innermost level of vmap maps into the batch, and results back.
class MappedBatch {
 public:
  template <typename Arguments>
  explicit MappedBatch(const Arguments& arguments) {
    for_each_tensor(arguments, [&](const Field<at::Tensor>& field) {
      if (const auto* mapped =
              at::functorch::maybeGetBatchedImpl(field.value)) {
        level_ = std::max(level_, mapped->level());
      }
    });
    const bool all_fold = !any_tensor(arguments, [&](const auto& field) {
      const auto* mapped = mapped_here(field.value);
      if (mapped != nullptr) {
        mapped_ = mapped->value().sym_size(mapped->bdim());
      }
      return mapped != nullptr && batch_dim(field.shape) < 0;
    });
    const auto dim = batch_dim(rows_of(arguments, Dim::kInputFeatures));
    can_fold_ = level_ > 0 && all_fold && dim >= 0; // packed sequences cannot
    if (can_fold_) {
      batch_ = arguments.input.sym_size(dim);
    }
  }

  bool can_fold() const {
    return can_fold_;
  }

  at::Tensor fold(const Field<at::Tensor>& field) const {
    const auto dim = batch_dim(field.shape);
    if (dim < 0) {
      return field.value;
    }
    if (const auto* mapped = mapped_here(field.value)) {
      return mapped->value().movedim(mapped->bdim(), dim).flatten(dim, dim + 1);
    }
    auto sizes = field.value.sym_sizes().vec();
    sizes.insert(sizes.begin() + dim, mapped_);
    return field.value.unsqueeze(dim).expand_symint(sizes).flatten(
        dim, dim + 1);
  }

  at::Tensor unfold(const at::Tensor& result, const Shape& shape) const {
    const auto dim = batch_dim(shape);
    const auto unfolded = result.unflatten_symint(dim, {mapped_, batch_});
    return at::functorch::makeBatched(unfolded, dim, level_);
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
  bool can_fold_ = false;
};

template <auto op, typename Arguments = ArgumentsOf<op>>
auto vmap_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_arguments(arguments);
  const MappedBatch batch(arguments);
  if (!batch.can_fold()) {
    return composite_kernel<op>(arguments);
  }
  const c10::impl::ExcludeDispatchKeyGuard below_vmap(
      c10::DispatchKey::FuncTorchBatched);
  auto results = call_with_mapped_tensors(
      arguments, [&](const auto& field) { return batch.fold(field); }, op);
  for_each_result(
      arguments, results, [&](at::Tensor& result, const Shape& shape) {
        result = batch.unfold(result, shape);
      });
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
