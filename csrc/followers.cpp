#include "followers.h"

#include <algorithm>

#include "shape.h"
#include "trtllm_gen.h"

namespace fmha::trtllm_gen {
namespace {

constexpr int kReductionThreads = 512;
// Bytes of one partial tile that a CTA reduces.
constexpr int64_t kSliceBytes = 8192;
// E4M3 kernels multiply probabilities by this to fill the type's range.
constexpr float kE4m3ProbabilityScale = 448.f;
// Of the softmax statistics: query tokens of a request are rounded up to a multiple, and there is a guard behind all.
constexpr int64_t kStatsTokens = 256;
constexpr int64_t kStatsGuardBytes = int64_t{1} << 20;

std::string mangled(DataType type) {
  switch (type) {
    case DataType::kE4m3:
      return "13__nv_fp8_e4m3";
    case DataType::kFp16:
      return "6__half";
    default:
      return "13__nv_bfloat16";
  }
}

int64_t columns_per_cta(const Row& row) { return int64_t{row.head_dim_per_cta_v} * (row.uses_2cta_mma ? 2 : 1); }

std::string reduction_function(const Problem& p, const Row& row) {
  const bool half_partials = p.dtype_o == DataType::kE4m3 || p.dtype_o == DataType::kFp16;
  const DataType partial = half_partials ? DataType::kFp16 : DataType::kBf16;
  std::string types = mangled(p.dtype_o);
  types += partial == p.dtype_o ? "S2_" : mangled(partial);
  return "_ZN12tensorrt_llm7kernels19fmhaReductionKernelILi" + std::to_string(row.tile_size_q) + "ELi" +
         std::to_string(columns_per_cta(row)) + "ELb" + (p.dtype_q == DataType::kE4m3 ? "1" : "0") + "E" + types +
         "EEv12KernelParamsbbbiiii";
}

}  // namespace

const char* reduction_cubin(DataType dtype_o) {
  switch (dtype_o) {
    case DataType::kE4m3:
      return "trtllm-gen-reduction/sm100f_reduction_e4m3.cubin";
    case DataType::kFp16:
      return "trtllm-gen-reduction/sm100f_reduction_fp16.cubin";
    default:
      return "trtllm-gen-reduction/sm100f_reduction_bf16.cubin";
  }
}

bool reduces_separately(const Row& row) {
  return row.multi_ctas_kv_mode == MultiCtasKvMode::kGmemReductionWithSeparateKernel;
}

Reduction separate_reduction(const Problem& p, const Row& row, const Shape& shape, const Device& device) {
  const int64_t columns = columns_per_cta(row);
  const int64_t slices = columns * 2 * row.tile_size_q / kSliceBytes;
  const int64_t heads_per_cta = row.groups_heads_q ? std::min<int64_t>(group_size(p), row.tile_size_q) : 1;
  const int64_t head_ctas = p.num_heads_q / heads_per_cta;
  const int64_t head_dim_ctas = p.head_dim_v / columns;
  const int64_t ctas =
      saturating_product(saturating_product(shape.num_ctas_q, head_ctas * head_dim_ctas), p.batch_size);
  const int64_t parts =
      std::max<int64_t>(1, std::min(2 * int64_t{device.sm_count} / std::max<int64_t>(1, ctas), slices));
  Reduction r{};
  r.function = reduction_function(p, row);
  r.grid[0] = static_cast<int>(shape.num_ctas_q * parts);
  r.grid[1] = static_cast<int>(head_ctas * head_dim_ctas);
  r.grid[2] = static_cast<int>(p.batch_size);
  r.block = kReductionThreads;
  r.scalars.is_token_sparse = p.sparse_mla != SparseMlaType::kNone;
  r.scalars.groups_tokens_heads_q = row.groups_tokens_heads_q;
  r.scalars.supports_var_sparse_top_k_lens =
      p.sparse_mla == SparseMlaType::kDynamicTokenSparse && p.head_dim_qk == 512 && p.head_dim_v == 512;
  r.scalars.num_ctas_for_reduction = static_cast<int>(parts);
  r.scalars.num_ctas_for_all_heads = static_cast<int>(head_ctas);
  r.scalars.head_dim_v = static_cast<int>(p.head_dim_v);
  r.scalars.num_head_dim_ctas_v = static_cast<int>(head_dim_ctas);
  r.scalars.tile_size_q = row.tile_size_q;
  r.scalars.sum_scale = p.dtype_q == DataType::kE4m3 ? kE4m3ProbabilityScale : 1.f;
  return r;
}

LseLaunch lse_launch(const Problem& p) {
  const int64_t values = p.sum_seq_lens_q * p.num_heads_q;
  int64_t threads = 1;
  while (threads < values && threads < 1024) threads *= 2;
  return {values, static_cast<int>(ceil_div(values, threads)), static_cast<int>(threads)};
}

int64_t softmax_stats_bytes(const Problem& p) {
  const int64_t rows =
      saturating_product(saturating_product(p.batch_size, round_up(p.max_seq_len_q, kStatsTokens)), p.num_heads_q);
  return saturating_product(rows, sizeof(SoftmaxStats)) + kStatsGuardBytes;
}

}  // namespace fmha::trtllm_gen
