#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <utility>

// What the checks of all operators are made of. Each raises one sentence with
// the operator, the argument, what was expected and what was given.
namespace lltm {

using NamedTensor = std::pair<const char*, const at::Tensor&>;
using NamedTensors = std::initializer_list<NamedTensor>;

// All of args defined, not nested, and on the device of the first.
void check_devices(const char* op, NamedTensors args);

// All of args dense, of one dtype, and that one supported.
void check_layouts_and_dtypes(const char* op, NamedTensors args);

// Sizes may be symbolic. names says what they mean: "[batch, state_size]".
void check_shape(
    const char* op,
    const NamedTensor& arg,
    const char* names,
    c10::SymIntArrayRef expected);

// weights [3 * state_size, state_size + input_features], for the input whose
// last dimension is input_features. Returns state_size.
c10::SymInt check_weights(
    const char* op,
    const at::Tensor& weights,
    const at::Tensor& input);

} // namespace lltm
