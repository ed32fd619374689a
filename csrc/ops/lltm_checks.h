#pragma once

#include "ops/checks.h"
#include "ops/lltm.h"

// The argument checks, called by every kernel that computes or infers a shape.
// They name the public operator also where its internal twin was called.
namespace lltm {

// Devices, layouts, dtypes and shapes.
void check_arguments(const ForwardArguments& arguments);
void check_arguments(const BackwardArguments& arguments);

} // namespace lltm
