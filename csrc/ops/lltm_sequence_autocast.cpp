#include "ops/autocast.h"
#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"

#include <torch/library.h>

// Does what lltm_autocast.cpp does for the cell.
namespace lltm {

namespace {

void implement(torch::Library& m) {
  m.impl("sequence_forward", as_kernel<autocast_kernel<sequence_forward>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<autocast_kernel<_sequence_forward_with_gates>>());
}

} // namespace

TORCH_LIBRARY_IMPL(lltm, AutocastCPU, m) {
  implement(m);
}

TORCH_LIBRARY_IMPL(lltm, AutocastCUDA, m) {
  implement(m);
}

} // namespace lltm
