#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

// An operator takes its arguments as one struct, with the names and the order
// of its schema. list() of the struct has an Argument for each of them.
// Whatever is done to all walks that list, so that no tensor can be forgotten.
namespace lltm {

using OptionalTensor = std::optional<at::Tensor>;

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
  kGateUnits, // 3 * state_size
  kFeatures   // state_size + input_features
};

constexpr size_t kNumberOfDims = static_cast<size_t>(Dim::kFeatures) + 1;

// The dimensions of a tensor, then kNone.
using Shape = std::array<Dim, 3>;

constexpr Shape kShapeOfWeights{Dim::kGateUnits, Dim::kFeatures};
constexpr Shape kShapeOfBias{Dim::kGateUnits};
constexpr Shape kShapeOfState{Dim::kBatch, Dim::kStateSize};

template <typename T>
struct Argument {
  const char* name;
  const T& value;
  // A tensor has these. Its dtype and device are those of input if nothing else
  // is said. Values that are read are on the CPU, wherever input is.
  Shape shape{};
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool on_cpu = false;
};

template <typename T>
Argument(
    const char*,
    const T&,
    const Shape& = {},
    at::ScalarType = at::ScalarType::Undefined,
    bool = false) -> Argument<T>;

namespace detail {

template <typename Result, typename Arguments>
Arguments arguments_of(Result (*op)(const Arguments&));

template <typename T, typename Visit>
void visit_if_tensor(const Argument<T>& argument, const Visit& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(argument);
  } else if constexpr (std::is_same_v<T, OptionalTensor>) {
    if (argument.value) {
      const auto& [name, value, shape, dtype, on_cpu] = argument;
      visit(Argument<at::Tensor>{name, *value, shape, dtype, on_cpu});
    }
  }
}

template <typename T, typename Replace>
T replaced(const Argument<T>& argument, const Replace& replace) {
  T value = argument.value;
  visit_if_tensor(
      argument, [&](const auto& tensor) { value = replace(tensor); });
  return value;
}

} // namespace detail

// The struct that op takes.
template <auto op>
using ArgumentsOf = decltype(detail::arguments_of(op));

// std::tuple<Argument<...>...>
template <typename Arguments>
using ListOf = decltype(std::declval<const Arguments&>().list());

// Calls visit(Argument<at::Tensor>) for each tensor that is there.
template <typename Arguments, typename Visit>
void for_each_tensor(const Arguments& arguments, const Visit& visit) {
  std::apply(
      [&](const auto&... each) { (detail::visit_if_tensor(each, visit), ...); },
      arguments.list());
}

// op(arguments), with replace(Argument<at::Tensor>) in place of each tensor
// that is there.
template <typename Arguments, typename Replace, typename Op>
auto call_with_replaced_tensors(
    const Arguments& arguments,
    const Replace& replace,
    const Op& op) {
  return std::apply(
      [&](const auto&... each) {
        return op(Arguments{detail::replaced(each, replace)...});
      },
      arguments.list());
}

} // namespace lltm
