#include "select.h"

#include <algorithm>
#include <climits>

#include "names.h"
#include "refusal.h"
#include "shape.h"
#include "tensor_maps.h"
#include "trtllm_gen.h"

namespace fmha {
namespace {

constexpr int64_t kMaxGridYz = 65535;
constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
// Pages of a dynamic-page row go up to one KV tile.
constexpr int64_t kMaxDynamicPage = 128;

bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// What no row can serve whatever its columns: ranges of the ABI's 32-bit fields and of the grid, nonsense. After this
// returns nothing, products of two fields fit in 64 bits.
std::vector<Mismatch> problem_faults(const Problem& p, const Device& device) {
  std::vector<Mismatch> faults;
  const auto range = [&](const char* field, int64_t value, int64_t low, int64_t high, const char* why = "") {
    if (value < low || value > high) {
      faults.push_back({field, std::to_string(value), std::to_string(low) + ".." + std::to_string(high) + why});
    }
  };
  range("sm_count", device.sm_count, 1, 4096);
  range("max_smem_bytes", device.max_smem_bytes, 1, 1 << 20);
  range("batch_size", p.batch_size, 1, kMaxGridYz, " (it is grid.z; run larger batches in parts)");
  range("num_heads_kv", p.num_heads_kv, 1, kMaxGridYz, " (it is grid.y)");
  range("num_heads_q", p.num_heads_q, 1, INT32_MAX);
  range("max_seq_len_q", p.max_seq_len_q, 1, INT32_MAX);
  range("max_seq_len_kv", p.max_seq_len_kv, 0, INT32_MAX);
  range("sum_seq_lens_q", p.sum_seq_lens_q, 1, INT32_MAX);
  range("head_dim_qk", p.head_dim_qk, 1, 1024);
  range("head_dim_v", p.head_dim_v, 1, 1024);
  range("page_size", p.page_size, 1, 32768);
  range("num_pages_k", p.num_pages_k, 1, INT32_MAX);
  range("num_pages_v", p.num_pages_v, 1, INT32_MAX);
  range("max_pages_per_seq", p.max_pages_per_seq, 1, INT32_MAX);
  range("window_left", p.window_left, -1, INT64_MAX - 1, " (-1 turns the window off)");
  if (!faults.empty()) return faults;
  if (p.num_heads_q % p.num_heads_kv != 0) {
    faults.push_back(
        {"num_heads_q", std::to_string(p.num_heads_q), "a multiple of num_heads_kv=" + std::to_string(p.num_heads_kv)});
  }
  const int64_t rows = p.batch_size * p.max_seq_len_q;
  if (!p.ragged_q && p.sum_seq_lens_q != rows) {
    faults.push_back({"sum_seq_lens_q", std::to_string(p.sum_seq_lens_q),
                      "batch_size * max_seq_len_q = " + std::to_string(rows) + " without cum_seq_lens_q"});
  }
  // TMA: strides below 2^40 bytes and multiples of 16. A size-1 dimension is never stepped over: any stride will do.
  const auto stride = [&](const char* field, int64_t size, int64_t value, DataType dtype) {
    const int64_t unit = 16 * 8 / bits(dtype);
    if (size > 1 && (value < 0 || value >= kMaxStrideBytes / 16 * unit || value % unit != 0)) {
      faults.push_back(
          {field, std::to_string(value), "a multiple of " + std::to_string(unit) + " elements below 2^40 bytes"});
    }
  };
  stride("stride_q_token", p.sum_seq_lens_q, p.stride_q.token, p.dtype_q);
  stride("stride_q_head", p.num_heads_q, p.stride_q.head, p.dtype_q);
  stride("stride_k_token", p.page_size, p.stride_k.token, p.dtype_k);
  stride("stride_k_head", p.num_heads_kv, p.stride_k.head, p.dtype_k);
  stride("stride_k_page", p.num_pages_k, p.stride_k.page, p.dtype_k);
  stride("stride_v_token", p.page_size, p.stride_v.token, p.dtype_v);
  stride("stride_v_head", p.num_heads_kv, p.stride_v.head, p.dtype_v);
  stride("stride_v_page", p.num_pages_v, p.stride_v.page, p.dtype_v);
  return faults;
}

// The predicate: does `row` serve `p` at all? Returns the answer; with `out` also every field that speaks against it.
// Only looks at fields that problem_faults() found sane when `sane` is set.
bool admits(const Row& row, const Problem& p, const Device& device, bool sane, std::vector<Mismatch>* out) {
  bool ok = true;
  const auto refuse = [&](const char* field, auto&& value, auto&& allowed, int64_t at_most = 0) {
    ok = false;
    if (out != nullptr) out->push_back({field, std::string(value()), std::string(allowed()), at_most});
    return out != nullptr;
  };
  const auto number = [&](const char* field, int64_t value, int64_t wanted) {
    return value == wanted ||
           refuse(field, [=] { return std::to_string(value); }, [=] { return std::to_string(wanted); });
  };
  const auto word = [&](const char* field, auto value, auto wanted) {
    return value == wanted || refuse(field, [=] { return name_of(value); }, [=] { return name_of(wanted); });
  };
  const auto at_most = [&](const char* field, int64_t value, int64_t limit) {
    return value <= limit || refuse(field, [=] { return std::to_string(value); }, [] { return std::string(); }, limit);
  };

  if (!number("sm", device.sm, row.sm)) return false;
  if (!word("dtype_q", p.dtype_q, row.dtype_q)) return false;
  if (!word("dtype_k", p.dtype_k, row.dtype_k)) return false;
  if (!word("dtype_v", p.dtype_v, row.dtype_v)) return false;
  if (!word("dtype_o", p.dtype_o, row.dtype_o)) return false;
  if (!word("layout", p.layout, row.layout)) return false;
  if (!word("kernel_type", p.kernel_type, KernelType::kGeneration)) return false;
  if (!word("mask", p.mask, MaskType::kCausal)) return false;
  if (!word("sparse_mla", p.sparse_mla, row.sparse_mla)) return false;
  if (!number("skips_softmax", p.skips_softmax, row.skips_softmax)) return false;
  if (!number("has_sliding_window_pool", p.has_sliding_window_pool, 0)) return false;
  if (!number("sage_block_q", p.sage_block_q, row.sage_q)) return false;
  if (!number("sage_block_k", p.sage_block_k, row.sage_k)) return false;
  if (!number("sage_block_p", p.sage_block_p, row.sage_p)) return false;
  if (!number("sage_block_v", p.sage_block_v, row.sage_v)) return false;
  if (!number("head_dim_qk", p.head_dim_qk, row.head_dim_qk)) return false;
  if (!number("head_dim_v", p.head_dim_v, row.head_dim_v)) return false;
  if (row.dynamic_page) {
    const bool fits =
        is_power_of_two(p.page_size) && p.page_size >= row.num_tokens_per_page && p.page_size <= kMaxDynamicPage;
    if (!fits && !refuse(
                     "page_size", [&] { return std::to_string(p.page_size); },
                     [&] {
                       std::string pages;
                       for (int64_t page = row.num_tokens_per_page; page <= kMaxDynamicPage; page *= 2) {
                         pages += (pages.empty() ? "" : ", ") + std::to_string(page);
                       }
                       return pages;
                     })) {
      return false;
    }
  } else if (!number("page_size", p.page_size, row.num_tokens_per_page)) {
    return false;
  }
  if (sane && p.num_heads_q % p.num_heads_kv == 0 &&
      !at_most("num_heads_q / num_heads_kv", p.num_heads_q / p.num_heads_kv, row.tile_size_q)) {
    return false;
  }
  if (row.mask != MaskType::kSlidingOrChunkedCausal) {
    const bool windowed = p.window_left >= 0;
    if (windowed && !refuse("window_left", [&] { return std::to_string(p.window_left); }, [] { return "-1"; }))
      return false;
    // One query token sees all keys under either mask.
    if (row.mask != MaskType::kCausal && (row.mask == MaskType::kCustom || p.max_seq_len_q > 1) &&
        !refuse("mask", [] { return name_of(MaskType::kCausal); }, [&] { return name_of(row.mask); })) {
      return false;
    }
  }
  if (row.smem_bytes > device.max_smem_bytes &&
      !refuse(
          "max_smem_bytes", [&] { return std::to_string(device.max_smem_bytes); },
          [&] { return "at least " + std::to_string(row.smem_bytes); })) {
    return false;
  }
  return ok;
}

// An admissible row with the split that its reduction allows, and how good it is: lower is better, compared in order.
struct Candidate {
  int row = -1;
  int64_t num_ctas_kv = 1;
  int64_t cost_tile = 0;  // rows of padding if one tile holds all packed rows, else re-reads of K and V
  int64_t cost_mode = 0;

  bool better_than(const Candidate& other) const {
    if (other.row < 0) return true;
    if (cost_tile != other.cost_tile) return cost_tile < other.cost_tile;
    return cost_mode < other.cost_mode;
  }
};

constexpr int64_t kCannotHold = int64_t{1} << 20;

Candidate candidate(int index, const Row& row, const Problem& p, const Device& device) {
  Candidate c;
  c.row = index;
  // One tile that holds all rows of a KV head reads K and V once: then the least padding. Else the fewest tiles.
  const int64_t ctas_q = ceil_div(p.max_seq_len_q, tokens_per_cta(p, row));
  c.cost_tile = ctas_q == 1 ? row.tile_size_q : kCannotHold + ctas_q;
  const int64_t wanted = wanted_splits(p, row, device);
  switch (row.multi_ctas_kv_mode) {
    case MultiCtasKvMode::kDisabled:
      c.cost_mode = wanted > 1 ? 2 : 0;
      break;
    case MultiCtasKvMode::kCgaSmemReduction:
      c.num_ctas_kv = cluster_splits(p, row, device, wanted);
      c.cost_mode = c.num_ctas_kv == wanted ? 0 : 3;
      break;
    default:
      c.num_ctas_kv = wanted;
      c.cost_mode = 1;
  }
  // A kernel that reduces needs something to reduce.
  if (row.multi_ctas_kv_mode != MultiCtasKvMode::kDisabled && c.num_ctas_kv < 2) c.cost_mode = 4;
  return c;
}

std::string describe(const Problem& p, const Row& row, const Shape& shape) {
  const int64_t group = p.num_heads_q / p.num_heads_kv;
  std::string text = std::to_string(group) + " heads x " +
                     std::to_string(std::min<int64_t>(p.max_seq_len_q, shape.num_tokens_per_cta_q)) +
                     " query tokens in a tile of " + std::to_string(row.tile_size_q) + " rows";
  if (shape.num_ctas_q > 1) text += ", " + std::to_string(shape.num_ctas_q) + " tiles a request";
  text += "; " + std::to_string(num_kv_tiles(p, row)) + " KV tiles of " + std::to_string(row.tile_size_kv) + " keys, ";
  text += shape.num_ctas_kv > 1 ? "split " + std::to_string(shape.num_ctas_kv) + " ways (" +
                                      std::string(name_of(row.multi_ctas_kv_mode)) + ")"
                                : std::string("not split");
  return text;
}

bool grid_fits(const Problem& p, const Row& row, int64_t num_ctas_kv) {
  const int64_t x = ceil_div(p.max_seq_len_q, tokens_per_cta(p, row)) * num_ctas_kv;
  // The kernels number their CTAs with an int32.
  return x <= INT32_MAX / (p.num_heads_kv * p.batch_size);
}

}  // namespace

Decision select(const Problem& p, const Manifest& manifest, const Device& device, bool trace) {
  if (manifest.size() > 0 && is_trtllm_gen(manifest[0])) return trtllm_gen::select(p, manifest, device, trace);
  Decision decision;
  std::vector<Mismatch> faults = problem_faults(p, device);
  const bool sane = faults.empty();
  Candidate best;
  for (int i = 0; sane && i < manifest.size(); ++i) {
    if (!admits(manifest[i], p, device, sane, nullptr)) continue;
    const Candidate c = candidate(i, manifest[i], p, device);
    if (c.better_than(best)) best = c;
  }
  if (best.row >= 0 && !grid_fits(p, manifest[best.row], best.num_ctas_kv)) {
    faults.push_back({"number of CTAs",
                      "batch_size * num_heads_kv * query tiles = " + std::to_string(p.batch_size) + " * " +
                          std::to_string(p.num_heads_kv) + " * " +
                          std::to_string(ceil_div(p.max_seq_len_q, tokens_per_cta(p, manifest[best.row]))),
                      "2^31 - 1 at most"});
    best.row = -1;
  }
  if (best.row >= 0) {
    std::string fault = first_tensor_map_fault(p, manifest[best.row]);
    if (!fault.empty()) {
      faults.push_back({"tensor layout", std::move(fault), ""});
      best.row = -1;
    }
  }
  if (best.row >= 0) {
    decision.row = best.row;
    decision.shape = launch_shape(p, manifest[best.row], best.num_ctas_kv);
    decision.reason = describe(p, manifest[best.row], decision.shape);
  }
  if (best.row >= 0 && !trace) return decision;

  std::vector<std::vector<Mismatch>> mismatches(manifest.size());
  for (int i = 0; i < manifest.size(); ++i) admits(manifest[i], p, device, sane, &mismatches[i]);
  if (best.row < 0) {
    decision.code = faults.empty() ? "no_kernel" : "bad_problem";
    decision.reason = refusal(manifest, faults, mismatches);
  }
  if (!trace) return decision;
  for (int i = 0; i < manifest.size(); ++i) {
    if (i == best.row) continue;
    std::string reason = in_words(mismatches[i]);
    if (reason.empty() && best.row >= 0) {
      const Candidate c = candidate(i, manifest[i], p, device);
      reason = "would run; " + std::string(manifest[best.row].name) + " is preferred";
      if (c.cost_tile != best.cost_tile) {
        reason += " for its tile of " + std::to_string(manifest[best.row].tile_size_q) + " rows";
      } else if (best.num_ctas_kv == 1) {
        reason += " because splitting KV would gain nothing";
      } else {
        reason += " for its split of " + std::to_string(best.num_ctas_kv) + " by " +
                  std::string(name_of(manifest[best.row].multi_ctas_kv_mode));
      }
    } else if (reason.empty()) {
      reason = in_words(faults);
    }
    decision.rejected.push_back({i, std::move(reason)});
  }
  return decision;
}

}  // namespace fmha
