// Grid, KV split and reduction of a chosen kernel; asks for another kernel where these need one.
#include <algorithm>

#include "shape.h"
#include "trtllm_gen.h"

namespace fmha::trtllm_gen {
namespace {

constexpr int64_t kMaxClusterReduction = 16;

// Query tiles of the longest request.
int64_t query_tiles(const Problem& p, const Row& row) {
  if (!is_generation(p) || p.max_seq_len_q <= 1) return ceil_div(p.max_seq_len_q, row.step_q);
  if (!row.groups_tokens_heads_q) return p.max_seq_len_q;
  return ceil_div(p.max_seq_len_q, std::max<int64_t>(1, row.step_q / group_size(p)));
}

// Keys that one query tile reads at most.
int64_t keys_to_read(const Problem& p, const Row& row, const Selection& s) {
  const int64_t kv = p.max_seq_len_kv;
  if (p.sparse_mla != SparseMlaType::kNone) return std::min(kv, p.sparse_top_k);
  if (s.mask != MaskType::kSlidingOrChunkedCausal || kv <= window_size(p)) return kv;
  return std::min(kv, window_size(p) + row.step_kv - 1);
}

}  // namespace

std::string in_words(const CtaConfig& c) {
  std::string text =
      "grid " + std::to_string(c.grid[0]) + "x" + std::to_string(c.grid[1]) + "x" + std::to_string(c.grid[2]);
  if (c.num_ctas_kv > 1) text += ", " + std::to_string(c.num_ctas_kv) + " KV splits";
  if (c.cluster > 1) text += ", cluster " + std::to_string(c.cluster);
  return text;
}

CtaConfig configure_ctas(const Problem& p, const Device& device, const Row& row, Selection& s) {
  s.select_again = false;
  CtaConfig c;
  c.num_ctas_q = query_tiles(p, row);
  const int64_t heads_per_cta = row.groups_heads_q ? std::min<int64_t>(group_size(p), row.step_q) : 1;
  // NVIDIA's code only asks that all heads divide, and then lets a CTA reach into the next KV head.
  if (group_size(p) % heads_per_cta != 0) {
    throw Refused{"heads_per_cta", "num_heads_q / num_heads_kv=" + std::to_string(group_size(p)) + " (allowed: up to " +
                                       std::to_string(heads_per_cta) +
                                       ", or a multiple of it: the kernel takes that many heads at a time)"};
  }
  const int64_t head_ctas = p.num_heads_q / heads_per_cta;
  const int64_t head_dim_ctas = row.head_dim_v / s.head_dim_per_cta_v;
  c.grid[0] = c.num_ctas_q;
  c.grid[1] = head_ctas * head_dim_ctas;
  c.grid[2] = p.batch_size;
  if (s.uses_2cta) {
    if (head_ctas != 2 || head_dim_ctas != 2) {
      throw Refused{"two_cta_shape", "MLA kernels on two CTAs need 128 query heads for one KV head, found " +
                                         std::to_string(p.num_heads_q)};
    }
    c.grid[0] *= 2;
    c.grid[1] /= 4;
  }
  const bool mla = is_mla(p), sparse = p.sparse_mla != SparseMlaType::kNone;
  if (s.mode != MultiCtasKvMode::kDisabled) {
    // Every CTA has two steps at least.
    const int64_t most = (keys_to_read(p, row, s) + 2 * row.step_kv - 1) / (2 * row.step_kv);
    c.num_ctas_kv = std::min(most, std::max<int64_t>(1, device.sm_count / std::max<int64_t>(1, c.num_ctas())));
    c.grid[0] *= c.num_ctas_kv;
    if (c.num_ctas_kv <= 1) {
      s.mode = MultiCtasKvMode::kDisabled;
      s.scheduler = TileScheduler::kPersistent;
      s.select_again = true;
    } else if (c.num_ctas() < device.sm_count && mla && !sparse && s.tile_kv == 128 && p.allows_tile_size_kv_64) {
      s.tile_kv = 64;
      s.select_again = true;
    }
    if (!is_single_mla_request(p) && c.num_ctas_kv > 1 && c.num_ctas_kv <= kMaxClusterReduction &&
        s.kernel_type == KernelType::kSwapsMmaAb && s.mode == MultiCtasKvMode::kGmemReduction && !s.force_gmem &&
        p.head_dim_v < 512) {
      s.mode = MultiCtasKvMode::kCgaSmemReduction;
      s.select_again = true;
    }
  }
  c.cluster = s.uses_2cta ? 2 : 1;
  if (s.mode == MultiCtasKvMode::kCgaSmemReduction) c.cluster *= c.num_ctas_kv;
  // Idle SMs share the columns of V.
  if (mla && !s.select_again && !s.uses_2cta && s.head_dim_per_cta_v == 512) {
    const int64_t factor = is_single_mla_request(p) ? 1 : 2;
    if (c.num_ctas() * factor <= device.sm_count) {
      s.head_dim_per_cta_v = c.num_ctas() * 2 * factor <= device.sm_count ? 128 : 256;
      s.select_again = true;
    }
  }
  return c;
}

}  // namespace fmha::trtllm_gen
