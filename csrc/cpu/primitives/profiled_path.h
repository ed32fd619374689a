#pragma once

#include <memory>

namespace at {
struct RecordFunction;
}

namespace lltm {

// Shows in a profile, for as long as it lives, which path a call takes. Its
// header, unlike that of RECORD_USER_SCOPE, costs a file no compile time.
class ProfiledPath {
 public:
  explicit ProfiledPath(const char* name);
  ~ProfiledPath();

 private:
  std::unique_ptr<at::RecordFunction> record_; // null: nobody profiles
};

} // namespace lltm
