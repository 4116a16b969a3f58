// The selector of our own families: which row of the manifest serves a problem, with what launch, or why none does.
#pragma once

#include <string>

#include "manifest.h"
#include "problem.h"

namespace fmha {

// Never throws for any values in `problem` and `device` (allocation failure aside). `trace` fills Decision::rejected.
// Whether a problem is supported is whether this returns a row: there is no second predicate.
Decision select(const Problem& problem, const Manifest& manifest, const Device& device, bool trace);

}  // namespace fmha
