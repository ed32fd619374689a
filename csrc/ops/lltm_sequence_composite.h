#pragma once

#include "ops/lltm_composite.h"
#include "ops/lltm_sequence.h"

// sequence_forward as a loop over the composite formulas of the cell.
namespace lltm {

SequenceForwardResult composite_forward(
    const SequenceForwardArguments& arguments);

} // namespace lltm
