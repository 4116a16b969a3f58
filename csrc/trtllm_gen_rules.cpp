// One pass: page, tile, kernel type and mask of the wanted kernel.
#include <algorithm>

#include "shape.h"
#include "trtllm_gen.h"

namespace fmha::trtllm_gen {
namespace {

constexpr int64_t kDynamicPage = 128;  // how the key spells "any page of 128 or more"

bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

void select_page(const Problem& p, Selection& s) {
  s.dynamic_page = false;
  if (p.sparse_mla != SparseMlaType::kNone) {
    s.page = 1;
  } else if (p.layout != QkvLayout::kPagedKv) {
    s.page = 0;
  } else if ((group_size(p) > 1 || s.second_attempt) && p.head_dim_qk == p.head_dim_v && p.page_size >= kDynamicPage) {
    if (!is_power_of_two(p.page_size)) {
      throw Refused{"dynamic_page_not_pow2",
                    "page_size=" + std::to_string(p.page_size) + " (allowed: 16, 32, 64, or a power of two from 128)"};
    }
    s.dynamic_page = true;
    s.page = kDynamicPage;
  } else {
    s.page = p.page_size;
  }
}

void keep_operands(Selection& s, int64_t tile_q) {
  s.kernel_type = KernelType::kKeepsMmaAb;
  s.tile_q = tile_q;
}

void swap_operands(Selection& s, int64_t tile_q) {
  s.kernel_type = KernelType::kSwapsMmaAb;
  s.tile_q = tile_q;
}

// Partial results of large MLA tiles go through a reduction kernel of their own.
void reduce_separately(Selection& s) {
  if (s.mode != MultiCtasKvMode::kDisabled) s.mode = MultiCtasKvMode::kGmemReductionWithSeparateKernel;
}

void use_2cta(Selection& s) {
  s.uses_2cta = true;
  s.head_dim_per_cta_v = 256;
}

void select_mla(const Problem& p, const Device& device, Selection& s) {
  const int64_t group = group_size(p);
  if (s.second_attempt && group % 16 == 0) {
    // Swapped operands take any number of heads, 16 a CTA, as they do for short sequences anyway.
    swap_operands(s, 16);
    return;
  }
  const int64_t tile_rows = saturating_product(p.batch_size * p.max_seq_len_q, ceil_div(group, 16));
  const int64_t most_splits = std::max<int64_t>(1, device.sm_count / std::max<int64_t>(1, tile_rows));
  const int64_t splits = std::min(ceil_div(p.max_seq_len_kv, 256), most_splits);
  const bool short_rows =
      ceil_div(p.max_seq_len_kv, std::max<int64_t>(1, splits)) <= 1024 && tile_rows <= device.sm_count;
  if (group <= 32 || short_rows) {
    swap_operands(s, group <= 8 ? 8 : 16);
    return;
  }
  keep_operands(s, 64);
  reduce_separately(s);
  if (group == 128) use_2cta(s);
}

void select_sparse_mla(const Problem& p, const Device& device, Selection& s) {
  const int64_t group = group_size(p);
  s.tile_kv = 128;
  if (group <= 32) {
    const int64_t tiles = p.batch_size * ceil_div(std::min(p.max_seq_len_kv, p.sparse_top_k), 128);
    const bool halves = group / 2 >= 8 && tiles <= device.sm_count / 8;
    swap_operands(s, halves ? group / 2 : group);
    return;
  }
  keep_operands(s, 64);
  reduce_separately(s);
  if (group == 128 && (p.max_seq_len_q > 1 || p.batch_size * 2 * 8 > device.sm_count)) use_2cta(s);
}

// With kept operands a CTA holds half of a 512-wide V, and partial results go to the separate reduction. NVIDIA's rules
// learn the first too late for their cost model, and the second never.
void split_wide_v(const Problem& p, Selection& s) {
  const bool wide = p.head_dim_v > 256 && s.kernel_type != KernelType::kSwapsMmaAb;
  s.head_dim_per_cta_v = wide ? 256 : p.head_dim_v;
  if (wide && s.mode == MultiCtasKvMode::kGmemReduction && p.dtype_o == DataType::kE2m1) {
    // The separate reduction writes no E2M1.
    s.mode = MultiCtasKvMode::kDisabled;
    s.scheduler = TileScheduler::kPersistent;
  } else if (wide && s.mode == MultiCtasKvMode::kGmemReduction) {
    s.mode = MultiCtasKvMode::kGmemReductionWithSeparateKernel;
  } else if (!wide && s.mode == MultiCtasKvMode::kGmemReductionWithSeparateKernel) {
    s.mode = MultiCtasKvMode::kGmemReduction;
  }
}

struct TileCost {
  int64_t tile;
  float per_key, per_reduction;
};
constexpr TileCost kTileCosts[] = {
    {128, 2.2f, 1.32f}, {64, 1.68f, 1.2f}, {32, 1.48f, 1.08f}, {16, 1.2f, 1.03f}, {8, 1.0f, 1.0f}};

void choose_tile(Selection& s, int64_t tile_q) {
  if (tile_q >= 64) {
    keep_operands(s, tile_q);
  } else {
    swap_operands(s, tile_q);
  }
}

// Whether a smaller tile of query rows, which splits the work over more CTAs, would be faster by NVIDIA's cost model.
// The copy of the selection is kept from one candidate to the next on purpose: what one of them switched off stays off,
// and golden depends on it.
void refine_tile(const Problem& p, const Manifest& manifest, const Device& device, Selection& s) {
  Selection probe = s;
  if (s.second_attempt) split_wide_v(p, probe);
  CtaConfig config = configure_ctas(p, device, require_row(p, manifest, device, probe), probe);
  if (2 * config.num_ctas() > device.sm_count || probe.tile_q <= 8) {
    if (s.steps != nullptr) {
      s.steps->push_back("cost model not asked: " + in_words(config) + " of " + std::to_string(device.sm_count) +
                         " SMs with tile " + std::to_string(probe.tile_q));
    }
    return;
  }
  const int64_t largest = s.tile_q;
  bool found = false;
  float best = 0.f;
  for (const TileCost& cost : kTileCosts) {
    if (cost.tile > largest || cost.tile < group_size(p)) continue;
    choose_tile(probe, cost.tile);
    if (s.second_attempt) split_wide_v(p, probe);
    const Row& row = require_row(p, manifest, device, probe);
    config = configure_ctas(p, device, row, probe);
    const int64_t steps = ceil_div(p.max_seq_len_kv, row.step_kv);
    const int64_t span = ceil_div(steps, std::max<int64_t>(1, config.num_ctas_kv)) * row.step_kv;
    const float keys = cost.per_key * static_cast<float>(span);
    const float reduction = cost.per_reduction * 128.f * static_cast<float>(config.num_ctas_kv);
    const float time = (keys + reduction) * static_cast<float>(ceil_div(config.num_ctas(), device.sm_count));
    if (s.steps != nullptr) {
      s.steps->push_back("cost model: tile " + std::to_string(cost.tile) + " takes " + std::to_string(time) + " with " +
                         in_words(config) + " (" + std::string(row.name) + ")");
    }
    if (found && time >= best) continue;
    found = true;
    best = time;
    s.tile_q = probe.tile_q;
    s.kernel_type = probe.kernel_type;
  }
}

void select_gqa(const Problem& p, const Manifest& manifest, const Device& device, Selection& s) {
  const int64_t group = group_size(p);
  if (p.dtype_q != p.dtype_k || p.dtype_q != p.dtype_v) {
    const bool eights = group <= 8 || (s.second_attempt && group % 16 != 0 && group % 8 == 0);
    swap_operands(s, eights ? 8 : 16);
    return;
  }
  const int64_t rows = group * p.max_seq_len_q;
  int64_t tile = 8;
  while (tile < rows && tile < 128) tile *= 2;
  choose_tile(s, tile);
  if (p.max_seq_len_q > 1) refine_tile(p, manifest, device, s);
}

}  // namespace

bool is_mla(const Problem& p) {
  return (p.head_dim_qk == 576 && p.head_dim_v == 512) || (p.head_dim_qk == 320 && p.head_dim_v == 256) ||
         p.sparse_mla != SparseMlaType::kNone;
}

bool is_single_mla_request(const Problem& p) {
  return p.batch_size == 1 && p.max_seq_len_q >= 1 && p.max_seq_len_q <= 16 && p.head_dim_qk == 576 &&
         p.head_dim_v == 512;
}

Selection::Selection(const Problem& p)
    : kernel_type(p.kernel_type),
      mask(p.mask),
      scheduler(is_generation(p) ? TileScheduler::kStatic : TileScheduler::kPersistent),
      mode(is_generation(p) ? MultiCtasKvMode::kGmemReduction : MultiCtasKvMode::kDisabled),
      head_dim_per_cta_v(p.head_dim_v) {}

void select_kernel(const Problem& p, const Manifest& manifest, const Device& device, Selection& s) {
  select_page(p, s);
  const bool sparse = p.sparse_mla != SparseMlaType::kNone;
  if (is_generation(p) && is_mla(p)) {
    if (sparse) {
      select_sparse_mla(p, device, s);
    } else {
      select_mla(p, device, s);
    }
    s.mask = MaskType::kDense;
    if (!sparse && p.max_seq_len_kv > window_size(p)) {
      throw Refused{"mla_sliding", "window_left=" + std::to_string(p.window_left) +
                                       " is shorter than max_seq_len_kv=" + std::to_string(p.max_seq_len_kv) +
                                       ": MLA kernels have no sliding window (allowed: -1)"};
    }
  } else if (is_generation(p)) {
    select_gqa(p, manifest, device, s);
  }
  if (!is_mla(p) && s.second_attempt) {
    split_wide_v(p, s);
  } else if (!is_mla(p) && p.head_dim_v > 256 && s.kernel_type != KernelType::kSwapsMmaAb) {
    s.head_dim_per_cta_v = 256;
  }
  if (!sparse && (s.mask == MaskType::kCausal || is_generation(p)) && p.max_seq_len_kv > window_size(p)) {
    s.mask = MaskType::kSlidingOrChunkedCausal;
  }
}

}  // namespace fmha::trtllm_gen
