#pragma once

#include "ops/arguments.h"

#include <c10/util/StringUtil.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

// What the checks of all operators are made of. Each raises one sentence with
// the operator, the argument, what was expected and what was given.
namespace lltm {

template <typename Got>
std::string expected(const char* op, const std::string& what, const Got& got) {
  return c10::str(op, ": expected ", what, ", but got ", got);
}

template <typename Got>
std::string expected(
    const char* op,
    const Argument<at::Tensor>& argument,
    const std::string& what,
    const Got& got) {
  return expected(op, c10::str(argument.name, " ", what), got);
}

// Checks all but the shape: that the argument is defined and dense, its device
// and its dtype. vmap must not map an argument whose values are read.
void check_tensor(
    const char* op,
    const Argument<at::Tensor>& argument,
    const at::Tensor& input);

// input first, which the others have to fit. The Autograd kernels call this,
// too, because FakeTensor hides the devices from the Meta kernel below them.
template <typename Arguments>
void check_tensors(const Arguments& a) {
  check_tensor(a.kOperator, Argument{"input", a.input}, a.input);
  for_each_tensor(a, [&](const Argument<at::Tensor>& argument) {
    check_tensor(a.kOperator, argument, a.input);
  });
}

// The sizes of a call. They may be symbolic.
class Sizes {
 public:
  // input and weights fix all sizes but the batch and time of packed sequences,
  // which are those of the first tensor that has them.
  Sizes(
      const char* op,
      const Argument<at::Tensor>& input,
      const Argument<at::Tensor>& weights);

  // Sizes that are not known yet become those of the argument.
  void unify(const Argument<at::Tensor>& argument);

  std::vector<c10::SymInt> of(const Shape& shape) const;

 private:
  std::optional<c10::SymInt>& size(Dim dim) {
    return sizes_[static_cast<size_t>(dim)];
  }

  const char* const op_;
  std::array<std::optional<c10::SymInt>, kNumberOfDims> sizes_;
};

// The checks of an operator's arguments, called by every kernel that computes
// or infers a shape. They name the public operator also where its internal twin
// was called. The values of batch_sizes are checked where they are read:
// lltm_sequence_steps.cpp.
template <typename Arguments>
Sizes check_arguments(const Arguments& a) {
  check_tensors(a);
  Sizes sizes(
      a.kOperator,
      {"input", a.input, a.row_shape(Dim::kInputFeatures)},
      {"weights", a.weights, kShapeOfWeights});
  for_each_tensor(
      a, [&](const Argument<at::Tensor>& argument) { sizes.unify(argument); });
  return sizes;
}

} // namespace lltm
