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

template <typename Result, typename Arguments, typename Fields>
struct Signature;

template <typename Result, typename Arguments, typename... Values>
struct Signature<Result, Arguments, std::tuple<Field<Values>...>> {
  using type = Result(Parameter<Values>...);

  template <Result (*function)(const Arguments&)>
  static Result call(Parameter<Values>... arguments) {
    return function(Arguments{arguments...});
  }
};

template <typename Result, typename Arguments>
Signature<Result, Arguments, FieldsOf<Arguments>> signature_of(
    Result (*function)(const Arguments&));

} // namespace detail

// Turns a function of a struct of arguments into what m.impl takes.
template <auto function>
constexpr auto as_kernel() {
  using Signature = decltype(detail::signature_of(function));
  return TORCH_FN(Signature::template call<function>);
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
  using Type = typename decltype(detail::signature_of(op))::type;
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(name, "")
                                 .template typed<Type>();
  return std::apply(
      [&](const auto&... fields) { return handle.call(fields.value...); },
      arguments.fields());
}

} // namespace lltm
