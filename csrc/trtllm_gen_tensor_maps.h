// Tensor maps of NVIDIA's kernels, as NVIDIA's host code makes them.
#pragma once

#include "tensor_maps.h"

namespace fmha::trtllm_gen {

// As fmha::encode_args().
int encode_args(const Problem& problem, const Row& row, const Buffers& buffers, TensorMapArgs out[kMaxTensorMaps]);

// Keys that one row of the K and V maps holds side by side; 1 unless K and V are converted on the way and short.
int64_t kv_reshape_factor(const Problem& problem, const Row& row);

// Separate K and V tensors count as one pool of twice the pages; 0 when not paged.
int64_t num_pages_in_pool(const Problem& problem, const Buffers& buffers);

}  // namespace fmha::trtllm_gen
