#include "ops/autocast.h"

#include "ops/checks.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_sequence.h"

#include <ATen/TracerMode.h>
#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/library.h>

namespace lltm {

bool autocast_applies(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return false;
  }
  const auto device_type = tensor.device().type();
  return (device_type == c10::kCPU || device_type == c10::kCUDA) &&
      at::autocast::is_autocast_enabled(device_type);
}

at::Tensor cast_for_autocast(
    const at::Tensor& tensor,
    c10::DeviceType device_type) {
  const auto dtype = at::autocast::get_autocast_dtype(device_type);
  const bool caches = at::autocast::is_autocast_cache_enabled();
  // torch.jit.trace takes what it finds in the cache for a constant, and each
  // call of a transform would leave casts of its own there.
  const bool traces = at::tracer::impl::is_dispatch_enabled();
  at::autocast::set_autocast_cache_enabled(
      caches && !traces && !transform_is_active());
  const auto restored = c10::make_scope_exit(
      [&] { at::autocast::set_autocast_cache_enabled(caches); });
  return at::autocast::cached_cast(dtype, tensor, device_type);
}

namespace {

// In a transform of torch.func, which runs the composite formulas, op computes
// in float64: the transform sends each operator that they call on with the keys
// that the thread had before, and autocast leaves only float64 alone. Where it
// casts another operator below its derivative, that fails over its dtypes.
template <auto op, typename Arguments = ArgumentsOf<op>>
auto exact_in_transforms(const Arguments& arguments)
    -> decltype(op(arguments)) {
  if (!transform_is_active()) {
    return op(arguments);
  }
  check_tensors(arguments);
  auto results = call_with_replaced_tensors(
      arguments,
      [](const Argument<at::Tensor>& argument) {
        return argument.value.is_floating_point()
            ? argument.value.to(at::kDouble)
            : argument.value;
      },
      op);
  const auto dtype = arguments.input.scalar_type();
  std::apply([&](auto&... each) { ((each = each.to(dtype)), ...); }, results);
  return results;
}

// All arguments in the autocast dtype, as for lstm_cell. What autograd calls
// has no kernel here: backward keeps the dtypes of what forward saved.
void implement(torch::Library& m) {
  m.impl("forward", as_kernel<autocast_kernel<exact_in_transforms<forward>>>());
  m.impl(
      "sequence_forward",
      as_kernel<autocast_kernel<exact_in_transforms<sequence_forward>>>());
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  implement(m);
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  implement(m);
}

} // namespace lltm
