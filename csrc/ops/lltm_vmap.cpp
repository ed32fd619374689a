#include "ops/dispatch.h"
#include "ops/lltm.h"
#include "ops/lltm_checks.h"
#include "ops/lltm_composite.h"
#include "ops/vmap.h"

#include <torch/library.h>

namespace lltm {

TORCH_LIBRARY_IMPL(lltm, FuncTorchBatched, m) {
  m.impl(
      "forward", as_kernel<forward_vmap_kernel<forward, composite::forward>>());
  m.impl(
      "_forward_with_gates",
      as_kernel<forward_vmap_kernel<
          _forward_with_gates,
          composite::forward_with_gates>>());
  m.impl(
      "backward",
      as_kernel<backward_vmap_kernel<backward, composite::backward>>());
}

} // namespace lltm
