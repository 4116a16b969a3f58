// From a selection to the row it names, or the rows that come nearest.
#include <algorithm>
#include <climits>
#include <vector>

#include "names.h"
#include "trtllm_gen.h"

namespace fmha::trtllm_gen {
namespace {

constexpr int64_t kMinHeadDim = 32, kMaxHeadDim = 1024, kMaxTile = 128;
constexpr int kMaxNearest = 3;

bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

// Limits of the key itself.
void check_key(const Problem& p, const Selection& s) {
  for (const int64_t dim : {s.head_dim_per_cta_v, p.head_dim_qk, p.head_dim_v}) {
    if (dim < kMinHeadDim || dim > kMaxHeadDim) {
      throw Refused{"head_dim_range", "head dim " + std::to_string(dim) + " (allowed: 32..1024)"};
    }
  }
  if (s.page != 0 && !is_power_of_two(s.page)) {
    throw Refused{"page_not_pow2",
                  "page_size=" + std::to_string(s.page) + " (allowed: 16, 32, 64, or a power of two from 128)"};
  }
  if (s.tile_q > kMaxTile || !is_power_of_two(s.tile_q)) {
    throw Refused{"tile_not_pow2", "num_heads_q / num_heads_kv=" + std::to_string(group_size(p)) +
                                       " would need a tile of " + std::to_string(s.tile_q) +
                                       " rows (allowed: a power of two up to 128)"};
  }
}

bool same_architecture(const Row& wanted, const Row& row) {
  return wanted.sm == row.sm || (row.sm == 10100 && (wanted.sm == 100 || wanted.sm == 103));
}

// Calls `visit(column, found)` for every column in which `row` differs and that a caller can do something about, until
// it returns false. Columns that tell rows apart best come first.
template <class Visit>
void visible_differences(const Row& wanted, const Row& row, Visit&& visit) {
  const bool wants_context = wanted.kernel_type == KernelType::kContext;
#define FMHA_COMPARE(name) (wanted.name == row.name || visit(#name, row.name))
  static_cast<void>(
      FMHA_COMPARE(dtype_o) && FMHA_COMPARE(head_dim_qk) && FMHA_COMPARE(num_tokens_per_page) &&
      FMHA_COMPARE(dtype_q) && FMHA_COMPARE(dtype_k) && FMHA_COMPARE(mask) && FMHA_COMPARE(head_dim_v) &&
      FMHA_COMPARE(dtype_v) && FMHA_COMPARE(skips_softmax) &&
      (wants_context == (row.kernel_type == KernelType::kContext) || visit("kernel_type", row.kernel_type)) &&
      FMHA_COMPARE(layout) && FMHA_COMPARE(sparse_mla) && FMHA_COMPARE(sage_q) && FMHA_COMPARE(sage_k) &&
      FMHA_COMPARE(sage_p) && FMHA_COMPARE(sage_v) && FMHA_COMPARE(dynamic_page) &&
      (same_architecture(wanted, row) || visit("sm", row.sm)));
#undef FMHA_COMPARE
}

// As above for what the rules decide by themselves.
template <class Visit>
void inner_differences(const Row& wanted, const Row& row, Visit&& visit) {
  const auto compare = [&](const char* column, auto value, auto found) {
    if (value != found) visit(column, found);
  };
  compare("kernel_type", wanted.kernel_type, row.kernel_type);
  compare("scheduler", wanted.scheduler, row.scheduler);
  compare("multi_ctas_kv_mode", wanted.multi_ctas_kv_mode, row.multi_ctas_kv_mode);
  compare("tile_size_q", wanted.tile_size_q, row.tile_size_q);
  compare("tile_size_kv", wanted.tile_size_kv, row.tile_size_kv);
  compare("head_dim_per_cta_v", wanted.head_dim_per_cta_v, row.head_dim_per_cta_v);
  compare("uses_2cta_mma", wanted.uses_2cta_mma, row.uses_2cta_mma);
}

// How many differences, or `limit` if there are that many or more.
int visible_distance(const Row& wanted, const Row& row, int limit) {
  int count = 0;
  visible_differences(wanted, row, [&](const char*, auto) { return ++count < limit; });
  return count;
}

template <class T>
std::string word(T value) {
  if constexpr (std::is_enum_v<T>) {
    return std::string(name_of(value));
  } else {
    return std::to_string(value);
  }
}

}  // namespace

Row wanted_row(const Problem& p, const Device& device, const Selection& s) {
  Row row;
  row.dtype_q = p.dtype_q;
  row.dtype_k = p.dtype_k;
  row.dtype_v = p.dtype_v;
  row.dtype_o = p.dtype_o;
  row.layout = p.layout;
  row.mask = s.mask;
  row.kernel_type = s.kernel_type;
  row.scheduler = s.scheduler;
  row.multi_ctas_kv_mode = s.mode;
  row.sparse_mla = p.sparse_mla;
  row.sm = device.sm;
  row.tile_size_q = static_cast<int>(s.tile_q);
  row.tile_size_kv = static_cast<int>(s.tile_kv);
  row.head_dim_per_cta_v = static_cast<int>(s.head_dim_per_cta_v);
  row.head_dim_qk = static_cast<int>(p.head_dim_qk);
  row.head_dim_v = static_cast<int>(p.head_dim_v);
  row.num_tokens_per_page = static_cast<int>(s.page);
  row.sage_q = static_cast<int>(p.sage_block_q);
  row.sage_k = static_cast<int>(p.sage_block_k);
  row.sage_p = static_cast<int>(p.sage_block_p);
  row.sage_v = static_cast<int>(p.sage_block_v);
  row.uses_2cta_mma = s.uses_2cta;
  row.skips_softmax = p.skips_softmax;
  row.dynamic_page = s.dynamic_page;
  return row;
}

std::string key_in_words(const Row& r) {
  std::string text =
      "dtypes=" + word(r.dtype_q) + "/" + word(r.dtype_k) + "/" + word(r.dtype_v) + "/" + word(r.dtype_o);
  const auto add = [&](const char* column, const std::string& value) {
    text += std::string(", ") + column + "=" + value;
  };
  add("layout", word(r.layout));
  add("mask", word(r.mask));
  add("kernel_type", word(r.kernel_type));
  add("scheduler", word(r.scheduler));
  add("multi_ctas_kv_mode", word(r.multi_ctas_kv_mode));
  add("head_dims", word(r.head_dim_qk) + "/" + word(r.head_dim_v) + " (" + word(r.head_dim_per_cta_v) + " a CTA)");
  add("tile", word(r.tile_size_q) + "x" + word(r.tile_size_kv));
  add("page_size", r.dynamic_page ? "128 or more" : word(r.num_tokens_per_page));
  if (r.uses_2cta_mma) add("uses_2cta_mma", "1");
  if (r.sparse_mla != SparseMlaType::kNone) add("sparse_mla", word(r.sparse_mla));
  if (r.skips_softmax) add("skips_softmax", "1");
  if (r.sage_q != 0 || r.sage_k != 0 || r.sage_p != 0 || r.sage_v != 0) {
    add("sage", word(r.sage_q) + "/" + word(r.sage_k) + "/" + word(r.sage_p) + "/" + word(r.sage_v));
  }
  return text;
}

std::string nearest_rows(const Manifest& manifest, const Row& wanted) {
  int nearest[kMaxNearest], distance[kMaxNearest], count = 0;
  for (int i = 0; i < manifest.size(); ++i) {
    const Row& row = manifest[i];
    const int limit = count == kMaxNearest ? distance[count - 1] : INT_MAX;
    const int d = visible_distance(wanted, row, limit);
    if (d >= limit) continue;
    // One row for each way of being different.
    if (std::any_of(nearest, nearest + count, [&](int j) { return visible_distance(manifest[j], row, 1) == 0; }))
      continue;
    int at = count < kMaxNearest ? count++ : count - 1;
    for (; at > 0 && distance[at - 1] > d; --at) {
      distance[at] = distance[at - 1];
      nearest[at] = nearest[at - 1];
    }
    distance[at] = d;
    nearest[at] = i;
  }
  std::string text;
  for (int n = 0; n < count; ++n) {
    const Row& row = manifest[nearest[n]];
    text += (n == 0 ? "" : "; ") + std::string(row.name) + " (";
    const size_t begin = text.size();
    const auto add = [&](const char* column, auto found) {
      text += (text.size() == begin ? "" : ", ") + std::string(column) + "=" + word(found);
      return true;
    };
    visible_differences(wanted, row, add);
    if (text.size() == begin) inner_differences(wanted, row, add);
    text += ")";
  }
  return text;
}

int find_row(const Problem& p, const Manifest& manifest, const Device& device, const Selection& s) {
  check_key(p, s);
  const int row = manifest.index().find(key_of(wanted_row(p, device, s)), device.sm);
  // The key keeps eighths of a head dim: 100 looks like 96.
  if (row >= 0 && (manifest[row].head_dim_qk != p.head_dim_qk || manifest[row].head_dim_v != p.head_dim_v)) return -1;
  return row;
}

const Row& require_row(const Problem& p, const Manifest& manifest, const Device& device, const Selection& s) {
  const int row = find_row(p, manifest, device, s);
  if (row >= 0) return manifest[row];
  const Row wanted = wanted_row(p, device, s);
  throw Refused{"kernel_not_found",
                "no kernel for " + key_in_words(wanted) + "; nearest kernels: " + nearest_rows(manifest, wanted)};
}

}  // namespace fmha::trtllm_gen
