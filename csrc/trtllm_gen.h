// Selection among NVIDIA's prebuilt trtllm-gen kernels by the rules of their host code: a key of 59 bits, decided in
// several passes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "manifest.h"
#include "problem.h"

namespace fmha::trtllm_gen {

// A refusal on its way out of the rules; select() turns it into a Decision.
struct Refused {
  const char* code;
  std::string reason;
};

// What the rules have decided so far. It persists from pass to pass.
struct Selection {
  explicit Selection(const Problem& problem);

  KernelType kernel_type;
  MaskType mask;
  TileScheduler scheduler;
  MultiCtasKvMode mode;
  int64_t head_dim_per_cta_v;
  int64_t page = 0;  // as the key spells it
  bool dynamic_page = false;
  int64_t tile_q = 128, tile_kv = 128;
  bool uses_2cta = false;
  bool force_gmem = false;
  bool select_again = false;
  // NVIDIA's rules miss kernels that exist. The second attempt, after they refused, closes the gaps that are known:
  // docs/differences.md.
  bool second_attempt = false;
  std::vector<std::string>* steps = nullptr;  // what happened, in words; null: nobody asked
};

// Of non-negative numbers; stops far above any limit instead of wrapping.
inline int64_t saturating_product(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) || product > INT64_MAX / 8 ? INT64_MAX / 8 : product;
}

// Grid of a selection's kernel.
struct CtaConfig {
  int64_t num_ctas_q = 0, num_ctas_kv = 1;
  int64_t grid[3] = {0, 0, 0};
  int64_t cluster = 1;
  int64_t num_ctas() const { return saturating_product(saturating_product(grid[0], grid[1]), grid[2]); }
};

inline int64_t group_size(const Problem& p) { return p.num_heads_q / p.num_heads_kv; }
inline int64_t window_size(const Problem& p) {
  return p.window_left == -1 ? INT32_MAX : std::min<int64_t>(p.window_left, INT32_MAX - 1) + 1;
}
inline bool is_generation(const Problem& p) { return p.kernel_type == KernelType::kGeneration; }
// Multi-head latent attention, known by its head dims.
bool is_mla(const Problem& p);
// DeepSeek-V3 decode of one request.
bool is_single_mla_request(const Problem& p);

// Columns that the row of this selection must have; `device.sm` as its architecture.
Row wanted_row(const Problem& p, const Device& device, const Selection& s);
// "layout=PagedKv, mask=Causal, ...".
std::string key_in_words(const Row& wanted);
// Up to three rows that differ from `wanted` in the fewest columns, with these columns; empty if none is near.
std::string nearest_rows(const Manifest& manifest, const Row& wanted);

// Index of the row, or -1. Throws Refused if no kernel could have such columns.
int find_row(const Problem& p, const Manifest& manifest, const Device& device, const Selection& s);
// As find_row(); throws Refused if the row does not exist.
const Row& require_row(const Problem& p, const Manifest& manifest, const Device& device, const Selection& s);

// Grid and KV split for `row`. May change `s` and then asks for another pass through s.select_again.
CtaConfig configure_ctas(const Problem& p, const Device& device, const Row& row, Selection& s);

// "grid 4x8x2, 4 KV splits, cluster 4".
std::string in_words(const CtaConfig& c);

// One pass of the rules that choose page, tile, kernel type and mask.
void select_kernel(const Problem& p, const Manifest& manifest, const Device& device, Selection& s);

// Whole selection; never throws for any values.
Decision select(const Problem& p, const Manifest& manifest, const Device& device, bool trace);

}  // namespace fmha::trtllm_gen
