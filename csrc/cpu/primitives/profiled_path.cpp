#include "cpu/primitives/profiled_path.h"

#include <ATen/record_function.h>

#include <utility>

namespace lltm {

ProfiledPath::ProfiledPath(const char* name) {
  if (auto callbacks =
          at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
    record_ = std::make_unique<at::RecordFunction>(std::move(*callbacks));
    record_->before(name);
  }
}

ProfiledPath::~ProfiledPath() = default;

} // namespace lltm
