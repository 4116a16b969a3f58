// One row of the kernel manifest, the same columns for every family, and the packed table that holds them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "problem.h"

namespace fmha {

struct Row {
  std::string_view name;    // unique in the manifest
  std::string_view cubin;   // artifact path in cubins.lock
  std::string_view symbol;  // entry point in the cubin
  DataType dtype_q, dtype_k, dtype_v, dtype_o;
  QkvLayout layout;
  MaskType mask;
  KernelType kernel_type;
  TileScheduler scheduler;
  MultiCtasKvMode multi_ctas_kv_mode;
  SparseMlaType sparse_mla;
  int sm;  // 90 = sm_90a, 100, 103, 10100 = sm_100f
  int tile_size_q, tile_size_kv, step_q, step_kv;
  int head_dim_per_cta_v, head_dim_qk, head_dim_v;
  int num_tokens_per_page;
  int smem_bytes, threads;
  int sage_q, sage_k, sage_p, sage_v;
  bool groups_heads_q, groups_tokens_heads_q, dynamic_page, reuse_smem_k_for_v, uses_2cta_mma, skips_softmax;
};

}  // namespace fmha
