#pragma once

#include "ops/arguments.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CompileTimeFunctionPointer.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <tuple>
#include <type_traits>

// Between the dispatcher, whose functions have a parameter for each argument of
// the schema, and ours, which take them as one struct.
namespace lltm {

namespace detail {

template <typename T>
using Parameter =
    std::conditional_t<std::is_trivially_copyable_v<T>, T, const T&>;

template <auto function, typename List = ListOf<ArgumentsOf<function>>>
struct Kernel;

template <auto function, typename... Values>
struct Kernel<function, std::tuple<Argument<Values>...>> {
  static auto run(Parameter<Values>... arguments) {
    return function(ArgumentsOf<function>{arguments...});
  }
};

} // namespace detail

// Turns a function of a struct of arguments into what m.impl takes.
template <auto function>
constexpr auto as_kernel() {
  return TORCH_FN(detail::Kernel<function>::run);
}

// Whether a transform of torch.func is active. functorchTLSAccessor() does not
// tell: it is set under AOTAutograd too.
inline bool transform_is_active() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Calls an operator of the library through the dispatcher. op is the function
// that does so: each has a handle of its own.
template <auto op, typename Arguments>
auto call(const char* name, const Arguments& arguments) {
  using Type = decltype(detail::Kernel<op>::run);
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(name, "")
                                 .template typed<Type>();
  return std::apply(
      [&](const auto&... each) { return handle.call(each.value...); },
      arguments.list());
}

} // namespace lltm
