#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

// An operator takes its arguments as one struct, with the names and the order
// of its schema. fields() of the struct lists them; whatever is done to all of
// them walks that list, so that no tensor can be forgotten.
namespace lltm {

using OptionalTensor = std::optional<at::Tensor>;

inline OptionalTensor if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : OptionalTensor();
}

// Which gradients are wanted, in this order: of input, weights, bias, and of
// the first h and cell state.
using OutputMask = std::array<bool, 5>;
constexpr OutputMask kAllWanted{true, true, true, true, true};

// What a dimension counts. Its size is the same in all arguments of a call.
enum class Dim : uint8_t {
  kNone,
  kBatch,
  kTime,
  kRows, // of a packed sequence: sum(batch_sizes)
  kInputFeatures,
  kStateSize,
  kGates,   // 3 * state_size
  kFeatures // state_size + input_features
};

constexpr size_t kNumberOfDims = static_cast<size_t>(Dim::kFeatures) + 1;

// The dimensions of a tensor, then kNone.
using Shape = std::array<Dim, 3>;

// Which dimension is the batch; -1 if none is, as in weights and in packed
// sequences.
constexpr int64_t batch_dim(const Shape& shape) {
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == Dim::kBatch) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

constexpr Shape kShapeOfWeights{Dim::kGates, Dim::kFeatures};
constexpr Shape kShapeOfBias{Dim::kGates};
constexpr Shape kShapeOfState{Dim::kBatch, Dim::kStateSize};

// The shape of input, and of results with another last dimension.
template <typename Arguments>
Shape rows_of(const Arguments& a, Dim last) {
  if constexpr (requires { a.batch_sizes; }) {
    return a.batch_sizes ? Shape{Dim::kRows, last}
                         : Shape{Dim::kTime, Dim::kBatch, last};
  } else {
    return {Dim::kBatch, last};
  }
}

// A tensor has to be on the device of input; or on the CPU, wherever input is,
// because its values are read.
enum class Place { kDevice, kCPU };

template <typename T>
struct Field {
  const char* name;
  const T& value;
  Shape shape{};
  at::ScalarType dtype = at::ScalarType::Undefined; // that of input
  Place place = Place::kDevice;
};

template <typename T>
Field(
    const char*,
    const T&,
    const Shape& = {},
    at::ScalarType = at::ScalarType::Undefined,
    Place = Place::kDevice) -> Field<T>;

namespace detail {

template <typename Result, typename Arguments>
Arguments arguments_of(Result (*op)(const Arguments&));

inline Field<at::Tensor> present(const Field<OptionalTensor>& field) {
  return {field.name, *field.value, field.shape, field.dtype, field.place};
}

template <typename T, typename Predicate>
bool holds(const Field<T>& field, const Predicate& predicate) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return predicate(field);
  } else if constexpr (std::is_same_v<T, OptionalTensor>) {
    return field.value && predicate(present(field));
  } else {
    return false;
  }
}

template <typename T, typename Transform>
T mapped(const Field<T>& field, const Transform& transform) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return transform(field);
  } else if constexpr (std::is_same_v<T, OptionalTensor>) {
    return field.value ? T(transform(present(field))) : T();
  } else {
    return field.value;
  }
}

} // namespace detail

// The struct that op takes.
template <auto op>
using ArgumentsOf = decltype(detail::arguments_of(op));

// std::tuple<Field<...>...>
template <typename Arguments>
using FieldsOf = decltype(std::declval<const Arguments&>().fields());

// Whether predicate(Field<at::Tensor>) holds for a tensor of arguments.
// Optional ones are asked where they are there.
template <typename Arguments, typename Predicate>
bool any_tensor(const Arguments& arguments, const Predicate& predicate) {
  return std::apply(
      [&](const auto&... fields) {
        return (detail::holds(fields, predicate) || ...);
      },
      arguments.fields());
}

template <typename Arguments, typename Visit>
void for_each_tensor(const Arguments& arguments, const Visit& visit) {
  any_tensor(arguments, [&](const Field<at::Tensor>& field) {
    visit(field);
    return false;
  });
}

// op(arguments), with transform(Field<at::Tensor>) in place of each tensor.
template <typename Arguments, typename Transform, typename Op>
auto call_with_mapped_tensors(
    const Arguments& arguments,
    const Transform& transform,
    const Op& op) {
  return std::apply(
      [&](const auto&... fields) {
        return op(Arguments{detail::mapped(fields, transform)...});
      },
      arguments.fields());
}

// The gradients, in the order of OutputMask.
template <typename Arguments>
auto shapes_of_gradients(const Arguments& a) {
  return std::array{
      rows_of(a, Dim::kInputFeatures),
      kShapeOfWeights,
      kShapeOfBias,
      kShapeOfState,
      kShapeOfState};
}

// Calls visit(result, shape) for each result that is wanted: all of those that
// go forward, or the gradients that output_mask asks for. The gates come last,
// so results may be without them.
template <typename Arguments, typename Results, typename Visit>
void for_each_result(const Arguments& a, Results& results, const Visit& visit) {
  const auto shapes = a.shapes_of_results();
  size_t i = 0;
  const auto visit_if_wanted = [&](auto& result) {
    bool wanted = true;
    if constexpr (requires { a.output_mask; }) {
      wanted = a.output_mask[i];
    }
    if (wanted) {
      visit(result, shapes[i]);
    }
    ++i;
  };
  std::apply([&](auto&... each) { (visit_if_wanted(each), ...); }, results);
}

} // namespace lltm
