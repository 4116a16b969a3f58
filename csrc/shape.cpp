#include "shape.h"

#include <algorithm>

#include "kernel_params.h"

namespace fmha {
namespace {

constexpr int64_t kThreadsPerSm = 2048;
// The driver keeps 1 KiB of shared memory for each resident block.
constexpr int64_t kReservedSmemPerBlock = 1024;
// sm_90 GPCs have 16 or 18 SMs; a cluster never spans two of them.
constexpr int64_t kSmsPerGpc = 16;
constexpr int64_t kMinTilesPerSplit = 2;

int64_t ctas_per_sm(const Row& row, const Device& device) {
  const int64_t by_smem = (device.max_smem_bytes + kReservedSmemPerBlock) / (row.smem_bytes + kReservedSmemPerBlock);
  return std::max<int64_t>(1, std::min(by_smem, kThreadsPerSm / row.threads));
}

int64_t unsplit_ctas(const Problem& problem, const Row& row) {
  return ceil_div(problem.max_seq_len_q, tokens_per_cta(problem, row)) * problem.num_heads_kv * problem.batch_size;
}

// Same longest CTA with fewer of them.
int64_t partial_stats_bytes(int64_t rows) {
  return round_up(rows * static_cast<int64_t>(sizeof(SoftmaxStats)), kScratchAlignment);
}

int64_t partial_o_bytes(int64_t rows, int64_t head_dim) {
  return rows * head_dim * static_cast<int64_t>(sizeof(float));
}

int64_t without_idle_ctas(int64_t tiles, int64_t splits) { return ceil_div(tiles, ceil_div(tiles, splits)); }

}  // namespace

int64_t tokens_per_cta(const Problem& problem, const Row& row) {
  if (!row.groups_tokens_heads_q) return 1;
  const int64_t group = problem.num_heads_q / problem.num_heads_kv;
  return std::max<int64_t>(1, row.tile_size_q / group);
}

int64_t num_kv_tiles(const Problem& problem, const Row& row) {
  const int64_t all = ceil_div(problem.max_seq_len_kv, row.tile_size_kv);
  if (problem.window_left < 0) return all;
  // The CTA's tokens are consecutive, so together they see window + tokens - 1 keys, at any offset into a tile.
  const int64_t tokens = std::min(tokens_per_cta(problem, row), problem.max_seq_len_q);
  const int64_t keys = std::min(problem.max_seq_len_kv, std::min(problem.window_left, problem.max_seq_len_kv) + tokens);
  return std::min(all, ceil_div(keys - 1, row.tile_size_kv) + 1);
}

int64_t wanted_splits(const Problem& problem, const Row& row, const Device& device) {
  const int64_t tiles = num_kv_tiles(problem, row);
  const int64_t resident = device.sm_count * ctas_per_sm(row, device);
  const int64_t splits = std::min(resident / unsplit_ctas(problem, row), tiles / kMinTilesPerSplit);
  return splits <= 1 ? 1 : without_idle_ctas(tiles, splits);
}

int64_t cluster_splits(const Problem& problem, const Row& row, const Device& device, int64_t wanted) {
  const int64_t gpcs = std::max<int64_t>(1, device.sm_count / kSmsPerGpc);
  const int64_t ctas_per_gpc = std::min<int64_t>(kSmsPerGpc, device.sm_count) * ctas_per_sm(row, device);
  const int64_t clusters = unsplit_ctas(problem, row);
  for (int64_t size = std::min<int64_t>(wanted, device.max_cluster_size); size > 1; --size) {
    if (gpcs * (ctas_per_gpc / size) >= clusters) return size;
  }
  return 1;
}

int64_t scratch_bound(const Problem& problem, const Manifest& manifest, const Device& device) {
  int64_t bound = -1;
  for (int i = 0; i < manifest.size(); ++i) {
    const Row& row = manifest[i];
    if (row.multi_ctas_kv_mode != MultiCtasKvMode::kGmemReduction || row.dtype_q != problem.dtype_q ||
        row.dtype_k != problem.dtype_k || row.head_dim_qk != problem.head_dim_qk ||
        row.head_dim_v != problem.head_dim_v) {
      continue;
    }
    const int64_t rows = device.sm_count * ctas_per_sm(row, device) * row.tile_size_q;
    bound = std::max(bound, partial_stats_bytes(rows) + partial_o_bytes(rows, row.head_dim_v));
  }
  return bound;
}

Shape launch_shape(const Problem& problem, const Row& row, int64_t num_ctas_kv) {
  Shape shape;
  const int64_t tokens = tokens_per_cta(problem, row);
  const int64_t num_ctas_q = ceil_div(problem.max_seq_len_q, tokens);
  shape.num_tokens_per_cta_q = static_cast<int>(tokens);
  shape.num_ctas_q = static_cast<int>(num_ctas_q);
  shape.num_ctas_kv = static_cast<int>(num_ctas_kv);
  shape.grid[0] = static_cast<int>(num_ctas_q * num_ctas_kv);
  shape.grid[1] = static_cast<int>(problem.num_heads_kv);
  shape.grid[2] = static_cast<int>(problem.batch_size);
  shape.cluster = row.multi_ctas_kv_mode == MultiCtasKvMode::kCgaSmemReduction ? shape.num_ctas_kv : 1;
  shape.block = row.threads;
  shape.smem_bytes = row.smem_bytes;
  if (row.multi_ctas_kv_mode == MultiCtasKvMode::kGmemReduction) {
    const int64_t tiles_out = num_ctas_q * problem.num_heads_kv * problem.batch_size;
    const int64_t rows_out = tiles_out * num_ctas_kv * row.tile_size_q;
    shape.num_counters = tiles_out;
    shape.partial_stats_bytes = partial_stats_bytes(rows_out);
    shape.partial_o_bytes = partial_o_bytes(rows_out, problem.head_dim_v);
  }
  return shape;
}

}  // namespace fmha
