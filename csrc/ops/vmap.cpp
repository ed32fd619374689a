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
#include <array>
#include <tuple>
#include <type_traits>

// The vmap kernels fold a mapped dimension of input and state into the batch,
// as more rows. Tensors without a batch, such as weights, cannot take it: if
// one of them is mapped, the composite formulas run, and become batched GEMMs.
namespace lltm {

namespace {

template <typename Arguments>
constexpr bool kIsBackward = std::is_same_v<Arguments, BackwardArguments> ||
    std::is_same_v<Arguments, SequenceBackwardArguments>;

// Folds what the innermost level of vmap maps into the batch, and results back.
class MappedBatch {
 public:
  template <typename Arguments>
  explicit MappedBatch(const Arguments& arguments)
      : dim_(batch_dim(arguments.rows(Dim::kInputFeatures))) {
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
    can_fold_ = level_ > 0 && all_fold && dim_ >= 0;
    if (can_fold_) {
      batch_ = arguments.input.sym_size(dim_);
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
    auto sizes = field.value.sym_sizes().vec();
    sizes.insert(sizes.begin() + dim, mapped_);
    const auto* mapped = mapped_here(field.value);
    const auto unfolded = mapped != nullptr
        ? mapped->value().movedim(mapped->bdim(), dim)
        : field.value.unsqueeze(dim).expand_symint(sizes);
    sizes.erase(sizes.begin() + dim);
    sizes[dim] = mapped_ * batch_;
    return unfolded.reshape_symint(sizes);
  }

  template <typename Results, size_t count>
  Results unfold(const Results& results, const std::array<Shape, count>& shapes)
      const {
    auto shape = shapes.begin();
    const auto unfold_next = [&](const at::Tensor& tensor) {
      return unfold(tensor, batch_dim(*shape++));
    };
    return std::apply(
        [&](const auto&... tensors) {
          return Results{unfold_next(tensors)...};
        },
        results);
  }

 private:
  at::Tensor unfold(const at::Tensor& tensor, int64_t dim) const {
    if (!tensor.defined()) {
      return tensor;
    }
    auto sizes = tensor.sym_sizes().vec();
    sizes[dim] = batch_;
    sizes.insert(sizes.begin() + dim, mapped_);
    return at::functorch::makeBatched(tensor.view_symint(sizes), dim, level_);
  }

  const at::functorch::BatchedTensorImpl* mapped_here(
      const at::Tensor& tensor) const {
    const auto* mapped = at::functorch::maybeGetBatchedImpl(tensor);
    return mapped != nullptr && mapped->level() == level_ ? mapped : nullptr;
  }

  const int64_t dim_; // of input, -1 if it is packed
  int64_t level_ = 0;
  c10::SymInt mapped_;
  c10::SymInt batch_;
  bool can_fold_ = false;
};

// Gradients without a batch, as those of weights, are sums over the rows of one
// mapped call.
template <typename Arguments>
bool wants_sums_over_rows(const Arguments& arguments) {
  if constexpr (kIsBackward<Arguments>) {
    const auto shapes = arguments.results();
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (arguments.output_mask[i] && batch_dim(shapes[i]) < 0) {
        return true;
      }
    }
  }
  return false;
}

template <auto op, typename Arguments = ArgumentsOf<op>>
auto vmap_kernel(const Arguments& arguments) -> decltype(op(arguments)) {
  check_devices(arguments);
  // vmap comes before autocast in the dispatch order, and composite formulas
  // must not be autocast one by one, each by a rule of its own.
  if constexpr (!kIsBackward<Arguments>) {
    if (autocast_applies(arguments.input)) {
      return call_in_lower_precision<vmap_kernel<op>>(arguments);
    }
  }
  check_arguments(arguments);
  const MappedBatch batch(arguments);
  if (!batch.can_fold() || wants_sums_over_rows(arguments)) {
    return composite_kernel<op>(arguments);
  }
  const c10::impl::ExcludeDispatchKeyGuard below_vmap(
      c10::DispatchKey::FuncTorchBatched);
  const auto results = call_with_mapped_tensors(
      arguments, [&](const auto& field) { return batch.fold(field); }, op);
  return batch.unfold(results, arguments.results());
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl("forward", as_kernel<vmap_kernel<forward>>());
  m.impl("_forward_with_gates", as_kernel<vmap_kernel<_forward_with_gates>>());
  m.impl("backward", as_kernel<vmap_kernel<backward>>());
  m.impl("sequence_forward", as_kernel<vmap_kernel<sequence_forward>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<vmap_kernel<_sequence_forward_with_gates>>());
  m.impl("sequence_backward", as_kernel<vmap_kernel<sequence_backward>>());
}

} // namespace lltm
