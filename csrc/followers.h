// Kernels that run after the attention kernel of trtllm-gen: the separate reduction of MLA partial results, and the
// log-sum-exp from softmax statistics.
#pragma once

#include <cstdint>
#include <string>

#include "manifest.h"
#include "problem.h"

namespace fmha::trtllm_gen {

struct Reduction {
  std::string function;  // mangled name of NVIDIA's kernel template with these arguments
  int grid[3];
  int block;
  bool is_token_sparse;
  bool groups_tokens_heads_q;
  bool supports_var_sparse_top_k_lens;
  int num_ctas_for_reduction;
  int num_ctas_for_all_heads;
  int num_head_dim_ctas_v;
};

// Whether `row` leaves its partial results to a separate kernel.
bool reduces_separately(const Row& row);

// The launch of that kernel.
Reduction separate_reduction(const Problem& problem, const Row& row, const Shape& shape, const Device& device);

struct LseLaunch {
  int64_t num_values;  // query tokens times heads
  int grid, block;
};
LseLaunch lse_launch(const Problem& problem);

}  // namespace fmha::trtllm_gen
