#pragma once

#include "ops/checks.h"
#include "ops/lltm_sequence.h"

// The argument checks of the sequence operators, as in lltm_checks.h. The
// values of batch_sizes are checked where they are read: lltm_sequence_steps.h.
namespace lltm {

void check_arguments(const SequenceForwardArguments& arguments);
void check_arguments(const SequenceBackwardArguments& arguments);

} // namespace lltm
