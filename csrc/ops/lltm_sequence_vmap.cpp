#include "ops/dispatch.h"
#include "ops/lltm_sequence.h"
#include "ops/lltm_sequence_checks.h"
#include "ops/lltm_sequence_composite.h"
#include "ops/vmap.h"

#include <torch/library.h>

namespace lltm {

TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl(
      "sequence_forward",
      as_kernel<forward_vmap_kernel<
          sequence_forward,
          composite::sequence_forward>>());
  m.impl(
      "_sequence_forward_with_gates",
      as_kernel<forward_vmap_kernel<
          _sequence_forward_with_gates,
          composite::sequence_forward_with_gates>>());
  m.impl(
      "sequence_backward",
      as_kernel<backward_vmap_kernel<
          sequence_backward,
          composite::sequence_backward>>());
}

} // namespace lltm
