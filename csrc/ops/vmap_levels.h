#pragma once

#include <ATen/functorch/BatchedTensorImpl.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <utility>

// What vmap has mapped, and how it becomes more rows of the batch.
namespace lltm {

using Tensors = std::initializer_list<std::reference_wrapper<const at::Tensor>>;

// The innermost level of vmap that maps one of args.
inline int64_t innermost_level(Tensors args) {
  int64_t level = 0;
  for (const at::Tensor& arg : args) {
    if (const auto* mapped = at::functorch::maybeGetBatchedImpl(arg)) {
      level = std::max(level, mapped->level());
    }
  }
  return level;
}

inline const at::functorch::BatchedTensorImpl* mapped_at_level(
    const at::Tensor& tensor,
    int64_t level) {
  const auto* mapped = at::functorch::maybeGetBatchedImpl(tensor);
  return mapped != nullptr && mapped->level() == level ? mapped : nullptr;
}

// Folds what vmap maps at a level into the batch, dimension dim of a tensor,
// and results back.
class MappedBatch {
 public:
  MappedBatch(Tensors args, c10::SymInt batch, int64_t level)
      : level_(level), batch_(std::move(batch)) {
    for (const at::Tensor& arg : args) {
      if (const auto* mapped = mapped_at_level(arg, level_)) {
        mapped_ = mapped->value().sym_size(mapped->bdim());
      }
    }
  }

  at::Tensor fold(const at::Tensor& arg, int64_t dim = 0) const {
    auto sizes = arg.sym_sizes().vec();
    sizes.insert(sizes.begin() + dim, mapped_);
    const auto* mapped = mapped_at_level(arg, level_);
    const auto unfolded = mapped != nullptr
        ? mapped->value().movedim(mapped->bdim(), dim)
        : arg.unsqueeze(dim).expand_symint(sizes);
    sizes.erase(sizes.begin() + dim);
    sizes[dim] = mapped_ * batch_;
    return unfolded.reshape_symint(sizes);
  }

  at::Tensor unfold(const at::Tensor& tensor, int64_t dim = 0) const {
    if (!tensor.defined()) {
      return tensor;
    }
    auto sizes = tensor.sym_sizes().vec();
    sizes[dim] = batch_;
    sizes.insert(sizes.begin() + dim, mapped_);
    return at::functorch::makeBatched(tensor.view_symint(sizes), dim, level_);
  }

 private:
  int64_t level_;
  c10::SymInt batch_;
  c10::SymInt mapped_;
};

} // namespace lltm
