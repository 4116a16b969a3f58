// Log-sum-exp of each query row from the softmax statistics that trtllm-gen kernels, or the reduction that follows
// them, leave behind. tools/build_cubins.py passes the macros.
#include <cmath>

#include "../kernel_params.h"
#include "programmatic_launch.cuh"

// stats: [tokens, heads], contiguous; maximum of the scaled logits in natural units, sum of exponentials relative to
// it. lse: value of (token, head) at token * stride_tokens + head * stride_heads, natural logarithm; -inf where the sum
// is 0.
extern "C" __global__ void __launch_bounds__(1024)
    FMHA_SYMBOL(fmha::SoftmaxStats const* stats, float* lse, int num_heads, int64_t stride_tokens, int64_t stride_heads,
                int num_values) {
  fmha::wait_for_earlier_kernels();
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= static_cast<unsigned>(num_values)) return;
  const float2 row = __ldcg(reinterpret_cast<float2 const*>(stats) + i);
  fmha::let_next_kernel_start();
  const int token = static_cast<int>(i) / num_heads, head = static_cast<int>(i) % num_heads;
  lse[token * stride_tokens + head * stride_heads] = row.y == 0.f ? -INFINITY : row.x + logf(row.y);
}
