// The passes: choose, find, configure, until nothing changes; then whether the clusters fit.
#include <algorithm>

#include "followers.h"
#include "names.h"
#include "refusal.h"
#include "shape.h"
#include "tensor_maps.h"
#include "trtllm_gen.h"

namespace fmha::trtllm_gen {
namespace {

constexpr int kMaxPasses = 4;
constexpr int64_t kLargestCluster = 16;
constexpr int64_t kStrideLimit = int64_t{1} << 50;

const char* phase_code(const Problem& p) {
  if (p.layout == QkvLayout::kSeparateQkv) return "missing_kernel_ragged";
  return is_generation(p) ? "missing_kernel_decode" : "missing_kernel_context";
}

// The rules compute in 32 bits and so does the ABI.
void check_ranges(const Problem& p, const Device& device) {
  std::vector<Mismatch> faults;
  const auto range = [&](const char* field, int64_t value, int64_t low, int64_t high = INT32_MAX) {
    if (value < low || value > high) {
      faults.push_back({field, std::to_string(value), std::to_string(low) + ".." + std::to_string(high)});
    }
  };
  range("sm_count", device.sm_count, 1);
  range("batch_size", p.batch_size, 1);
  range("max_seq_len_q", p.max_seq_len_q, 1);
  range("max_seq_len_kv", p.max_seq_len_kv, 0);
  range("sum_seq_lens_q", p.sum_seq_lens_q, 1);
  range("sum_seq_lens_kv", p.sum_seq_lens_kv, 0);
  range("num_heads_q", p.num_heads_q, 1);
  range("num_heads_kv", p.num_heads_kv, 1);
  range("head_dim_qk", p.head_dim_qk, 1);
  range("head_dim_v", p.head_dim_v, 1);
  range("page_size", p.page_size, 0);
  // Separate K and V pools count as one of twice the pages; without any, the batch's own pages count.
  range("num_pages_k", p.num_pages_k, 0, INT32_MAX / 2);
  range("max_pages_per_seq", p.max_pages_per_seq, 0);
  if (faults.empty() && p.num_pages_k == 0) {
    range("batch_size * max_pages_per_seq", p.batch_size * p.max_pages_per_seq, 0, INT32_MAX / 2);
  }
  if (faults.empty() && p.has_lse) range("sum_seq_lens_q * num_heads_q", p.sum_seq_lens_q * p.num_heads_q, 1);
  range("sparse_top_k", p.sparse_top_k, 0);
  // A window longer than any sequence is none, so only one end is bounded.
  range("window_left", std::min<int64_t>(p.window_left, INT32_MAX), INT32_MIN);
  if (p.layout == QkvLayout::kPagedKv) range("page_size", p.page_size, 1);
  // Only so that no product overflows; what TMA takes is checked when the tile is known.
  const auto stride = [&](const char* field, int64_t value) {
    if (value < -kStrideLimit || value > kStrideLimit) faults.push_back({field, std::to_string(value), "up to 2^50"});
  };
  stride("stride_q_token", p.stride_q.token);
  stride("stride_q_head", p.stride_q.head);
  stride("stride_k_token", p.stride_k.token);
  stride("stride_k_head", p.stride_k.head);
  stride("stride_k_page", p.stride_k.page);
  stride("stride_v_token", p.stride_v.token);
  stride("stride_v_head", p.stride_v.head);
  stride("stride_v_page", p.stride_v.page);
  stride("stride_kv_sf_head", p.stride_kv_sf_head);
  stride("stride_kv_sf_page", p.stride_kv_sf_page);
  for (const int64_t block : {p.sage_block_q, p.sage_block_k, p.sage_block_p, p.sage_block_v})
    range("sage block", block, 0);
  if (!faults.empty()) throw Refused{"overflow_32bit", in_words(faults)};
  if (p.num_heads_q % p.num_heads_kv != 0) {
    throw Refused{"heads_indivisible", "num_heads_q=" + std::to_string(p.num_heads_q) +
                                           " (allowed: a multiple of num_heads_kv=" + std::to_string(p.num_heads_kv) +
                                           ")"};
  }
}

int64_t max_active_clusters(const Device& device, int64_t cluster) {
  if (cluster > kLargestCluster) return 0;
  int64_t clusters = 0;
  for (const int sms : device.gpc_sms) clusters += sms / cluster;
  return clusters;
}

void check_grid(const CtaConfig& c) {
  for (const int64_t size : c.grid) {
    if (size > INT32_MAX)
      throw Refused{"overflow_32bit", "grid dimension " + std::to_string(size) + " (allowed: up to 2147483647)"};
  }
}

Shape launch_shape(const Problem& p, const Device& device, const Row& row, const CtaConfig& c) {
  check_grid(c);
  Shape shape;
  for (int i = 0; i < 3; ++i) shape.grid[i] = static_cast<int>(c.grid[i]);
  shape.cluster = static_cast<int>(c.cluster);
  shape.block = row.threads;
  shape.smem_bytes = row.smem_bytes;
  shape.num_ctas_q = static_cast<int>(c.num_ctas_q);
  shape.num_ctas_kv = static_cast<int>(c.num_ctas_kv);
  const int64_t group = group_size(p);
  int64_t tokens = 1;
  if (!row.groups_heads_q) {
    tokens = row.tile_size_q;
  } else if (row.groups_tokens_heads_q) {
    tokens = std::max<int64_t>(1, row.tile_size_q / std::min<int64_t>(row.tile_size_q, group));
  }
  shape.num_tokens_per_cta_q = static_cast<int>(tokens);
  // Where the partial outputs begin, whether or not this launch has any.
  shape.partial_stats_bytes = int64_t{8} * device.sm_count * row.step_q;
  if (row.multi_ctas_kv_mode == MultiCtasKvMode::kGmemReduction ||
      row.multi_ctas_kv_mode == MultiCtasKvMode::kGmemReductionWithSeparateKernel) {
    shape.num_counters = c.num_ctas() / std::max<int64_t>(1, c.num_ctas_kv);
    const int64_t columns = row.head_dim_per_cta_v * (row.uses_2cta_mma ? 2 : 1);
    shape.partial_o_bytes = 2 * c.num_ctas() * row.tile_size_q * columns;
  }
  if (p.has_lse) shape.softmax_stats_bytes = softmax_stats_bytes(p);
  return shape;
}

void note(const Selection& s, const std::string& step) {
  if (s.steps != nullptr) s.steps->push_back(step);
}

Decision run(const Problem& p, const Manifest& manifest, const Device& device, bool second_attempt,
             std::vector<std::string>* steps) {
  Selection s(p);
  s.second_attempt = second_attempt;
  s.steps = steps;
  CtaConfig c;
  int row = -1;
  for (int pass = 1;; ++pass) {
    if (pass > kMaxPasses) throw Refused{"did_not_converge", "the selection changes its mind in every pass"};
    select_kernel(p, manifest, device, s);
    row = find_row(p, manifest, device, s);
    if (row < 0) {
      const Row wanted = wanted_row(p, device, s);
      throw Refused{pass == 1 ? phase_code(p) : "kernel_not_found",
                    "no kernel for " + key_in_words(wanted) + "; nearest kernels: " + nearest_rows(manifest, wanted)};
    }
    c = configure_ctas(p, device, manifest[row], s);
    if (steps != nullptr) {
      note(s, "pass " + std::to_string(pass) + ": " + std::string(manifest[row].name) + ", " + in_words(c) +
                  (s.select_again ? "; now wanted: " + key_in_words(wanted_row(p, device, s)) : ""));
    }
    if (!s.select_again) break;
  }
  bool fell_back = false;
  if (s.mode == MultiCtasKvMode::kCgaSmemReduction &&
      max_active_clusters(device, c.cluster) * c.cluster < c.num_ctas()) {
    fell_back = true;
    s.force_gmem = true;
    s.mode = MultiCtasKvMode::kGmemReduction;
    select_kernel(p, manifest, device, s);
    const Row& fallback = require_row(p, manifest, device, s);
    row = static_cast<int>(&fallback - &manifest[0]);
    c = configure_ctas(p, device, fallback, s);
    if (steps != nullptr) note(s, "clusters do not fit: " + std::string(fallback.name) + ", " + in_words(c));
    if (s.select_again)
      throw Refused{"did_not_converge", "the fallback to a reduction in global memory asks for another kernel"};
  }
  if (p.sparse_top_k % 4 != 0) {
    throw Refused{"sparse_topk_mod4", "sparse_top_k=" + std::to_string(p.sparse_top_k) + " (allowed: a multiple of 4)"};
  }
  const std::string fault = first_tensor_map_fault(p, manifest[row]);
  if (!fault.empty()) throw Refused{"tensor_layout", fault};
  Decision decision;
  decision.row = row;
  decision.shape = launch_shape(p, device, manifest[row], c);
  decision.reason = key_in_words(wanted_row(p, device, s));
  if (fell_back)
    decision.reason += "; its clusters would not all be resident, so partial results go through global memory";
  return decision;
}

// Whether a kernel may exist although the rules found none.
bool may_be_a_gap(const std::string& code) {
  return code == "missing_kernel_decode" || code == "missing_kernel_context" || code == "kernel_not_found" ||
         code == "heads_per_cta";
}

}  // namespace

Decision select(const Problem& p, const Manifest& manifest, const Device& device, bool trace) {
  Decision refusal;
  std::vector<std::string> steps;
  const auto attempt = [&](bool second) {
    Decision decision = run(p, manifest, device, second, trace ? &steps : nullptr);
    decision.steps = std::move(steps);
    return decision;
  };
  try {
    check_ranges(p, device);
    return attempt(false);
  } catch (const Refused& refused) {
    refusal.code = refused.code;
    refusal.reason = refused.reason;
  }
  if (trace) steps.push_back("refused (" + refusal.code + "): " + refusal.reason);
  if (may_be_a_gap(refusal.code)) {
    try {
      if (trace) steps.push_back("second attempt, beyond NVIDIA's rules");
      Decision decision = attempt(true);
      decision.reason += "; NVIDIA's own rules refuse this call (" + refusal.code + ")";
      return decision;
    } catch (const Refused& refused) {
      if (trace) steps.push_back("refused (" + std::string(refused.code) + "): " + refused.reason);
    }
  }
  refusal.steps = std::move(steps);
  return refusal;
}

}  // namespace fmha::trtllm_gen
