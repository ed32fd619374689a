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
    const Field<at::Tensor>& argument,
    const std::string& what,
    const Got& got) {
  return expected(op, c10::str(argument.name, " ", what), got);
}

// Checks that the argument is defined, not nested, and where it belongs: the
// Autograd kernels would fail over the sizes of a nested tensor. input has to
// be checked first.
void check_device(
    const char* op,
    const Field<at::Tensor>& argument,
    const at::Tensor& input);

// Checks the devices of all tensors. The Autograd kernels call this, because
// FakeTensor hides the devices from the Meta kernel below them.
template <typename Arguments>
void check_devices(const Arguments& a) {
  check_device(a.kOperator, Field{"input", a.input}, a.input);
  for_each_tensor(a, [&](const Field<at::Tensor>& argument) {
    check_device(a.kOperator, argument, a.input);
  });
}

// Checks that the argument is dense, and has the dtype of its field. If that is
// the dtype of input, it has to be one of ours. vmap must not map an argument
// whose values are read.
void check_layout_and_dtype(
    const char* op,
    const Field<at::Tensor>& argument,
    const at::Tensor& input);

// The sizes of a call. They may be symbolic.
class Sizes {
 public:
  // input and weights fix all sizes but the batch and time of packed sequences,
  // which are those of the first tensor that has them.
  Sizes(
      const char* op,
      const Field<at::Tensor>& input,
      const at::Tensor& weights);

  void check(const Field<at::Tensor>& argument);

  std::vector<c10::SymInt> of(const Shape& shape) const;

 private:
  const char* const op_;
  std::array<std::optional<c10::SymInt>, kNumberOfDims> sizes_;
};

// The checks of an operator's arguments, called by every kernel that computes
// or infers a shape: devices, layouts, dtypes and shapes. They name the public
// operator also where its internal twin was called. The values of batch_sizes
// are checked where they are read: lltm_sequence_steps.cpp.
template <typename Arguments>
Sizes check_arguments(const Arguments& a) {
  check_devices(a);
  for_each_tensor(a, [&](const Field<at::Tensor>& argument) {
    check_layout_and_dtype(a.kOperator, argument, a.input);
  });
  const auto input = Field{"input", a.input, rows_of(a, Dim::kInputFeatures)};
  Sizes sizes(a.kOperator, input, a.weights);
  for_each_tensor(
      a, [&](const Field<at::Tensor>& argument) { sizes.check(argument); });
  return sizes;
}

} // namespace lltm
