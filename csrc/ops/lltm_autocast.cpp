#include "ops/autocast.h"
#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_checks.h"

#include <torch/library.h>

// Autocast: all arguments in the autocast dtype, as for lstm_cell. backward has
// no kernel here: it keeps the dtypes of what forward saved.
namespace lltm {

namespace {

void implement(torch::Library& m) {
  m.impl("forward", as_kernel<autocast_kernel<forward>>());
  m.impl(
      "_forward_with_gates", as_kernel<autocast_kernel<_forward_with_gates>>());
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  implement(m);
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  implement(m);
}

} // namespace lltm
