#pragma once

#include "ops/arguments.h"

#include <c10/util/StringUtil.h>

#include <string>

// What the checks of all operators are made of. Each raises one sentence with
// the operator, the argument, what was expected and what was given.
namespace lltm {

template <typename Got>
std::string expected(const char* op, const std::string& what, const Got& got) {
  return c10::str(op, ": expected ", what, ", but got ", got);
}

// Also raises if it is nested: the Autograd kernels would fail over the sizes.
void check_defined(const char* op, const Field<at::Tensor>& argument);

// Defined, and where it belongs. input is known to be defined.
void check_device(
    const char* op,
    const Field<at::Tensor>& argument,
    const at::Tensor& input);

// Checks the devices of all tensors. The Autograd kernels call this, because
// FakeTensor hides the devices from the Meta kernel below them.
template <typename Arguments>
void check_devices(const Arguments& a) {
  check_defined(a.kOperator, field("input", a.input));
  for_each_tensor(a, [&](const Field<at::Tensor>& argument) {
    check_device(a.kOperator, argument, a.input);
  });
}

// Dense, and of the dtype of input, which has to be supported.
void check_layout_and_dtype(
    const char* op,
    const Field<at::Tensor>& argument,
    const at::Tensor& input);

// Other arguments, optional ones too, have a dtype of their own.
template <typename T>
void check_layout_and_dtype(
    const char* /*op*/,
    const Field<T>& /*argument*/,
    const at::Tensor& /*input*/) {}

template <typename Arguments>
void check_layouts_and_dtypes(const Arguments& a) {
  std::apply(
      [&](const auto&... arguments) {
        (check_layout_and_dtype(a.kOperator, arguments, a.input), ...);
      },
      a.fields());
}

// Sizes may be symbolic. names says what they mean: "[batch, state_size]".
void check_shape(
    const char* op,
    const Field<at::Tensor>& argument,
    const char* names,
    c10::SymIntArrayRef sizes);

// weights [3 * state_size, state_size + input_features], for the input whose
// last dimension is input_features. Returns state_size.
c10::SymInt check_weights(
    const char* op,
    const at::Tensor& weights,
    const at::Tensor& input);

} // namespace lltm
