// KernelParams of one launch, all but the tensor maps.
#pragma once

#include "kernel_params.h"
#include "manifest.h"
#include "problem.h"

namespace fmha {

// Constants that divide a non-negative int32 by `divisor` >= 1.
FastModDiv fast_mod_div(int32_t divisor);

// Writes every byte of `params` (tensor-map slots become zero). `shape` must come from a decision for this problem and
// row: ranges were checked there. No heap allocation.
void fill_params(const Problem& problem, const Row& row, const Shape& shape, const Buffers& buffers,
                 KernelParams* params);

}  // namespace fmha
