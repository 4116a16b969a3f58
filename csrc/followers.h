// Kernels that run after the attention kernel of trtllm-gen: the separate reduction of partial results, and the
// log-sum-exp from softmax statistics. NVIDIA's host code compiles its own; ours are csrc/kernels/trtllm_gen_*.cu, with
// the same grids and arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernel_params.h"
#include "manifest.h"
#include "problem.h"

namespace fmha::trtllm_gen {

// What our reduction kernel takes after KernelParams, as it lies in the kernel's parameters. The last two are template
// arguments of NVIDIA's.
struct ReductionScalars {
  bool is_token_sparse;
  bool groups_tokens_heads_q;
  bool supports_var_sparse_top_k_lens;
  int32_t num_ctas_for_reduction;
  int32_t num_ctas_for_all_heads;
  int32_t head_dim_v;
  int32_t num_head_dim_ctas_v;
  int32_t tile_size_q;
  float sum_scale;  // that the attention kernel's sums carry
};
constexpr size_t kReductionParamBytes = sizeof(KernelParams) + sizeof(ReductionScalars);

struct Reduction {
  std::string function;  // mangled name of NVIDIA's kernel template with these arguments
  int grid[3];
  int block;
  ReductionScalars scalars;
};

// Whether `row` leaves its partial results to a separate kernel.
bool reduces_separately(const Row& row);

// Our kernel that does it for this output, by its path in the lock. E2M1 has none: rows that would need it are not
// chosen.
const char* reduction_cubin(DataType dtype_o);

// The launch of that kernel.
Reduction separate_reduction(const Problem& problem, const Row& row, const Shape& shape, const Device& device);

// What the LSE kernel takes.
struct LseArguments {
  const SoftmaxStats* stats;
  float* lse;
  int32_t num_heads;
  int64_t stride_tokens;  // of lse, in elements
  int64_t stride_heads;
  int32_t num_values;  // query tokens times heads
};
constexpr size_t kLseParamBytes = offsetof(LseArguments, num_values) + sizeof(int32_t);
constexpr const char* kLseCubin = "trtllm-gen-lse/sm100f_lse.cubin";

struct LseLaunch {
  int64_t num_values;  // query tokens times heads
  int grid, block;
};
LseLaunch lse_launch(const Problem& problem);

// Room for the statistics that the LSE is made from. As much as NVIDIA's host code gives its kernels: they are not
// known to stop at the last token.
int64_t softmax_stats_bytes(const Problem& problem);

}  // namespace fmha::trtllm_gen
