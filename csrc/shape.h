// From a problem and a row to the launch: grid, cluster, scratch. Own families only; trtllm-gen has its own rules.
#pragma once

#include <cstdint>

#include "manifest.h"
#include "problem.h"

namespace fmha {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Query tokens that share one tile; never 0, so a row whose tile is smaller than the head group must be refused before.
int64_t tokens_per_cta(const Problem& problem, const Row& row);

// Most KV tiles that a CTA of `row` may have to read, given the window.
int64_t num_kv_tiles(const Problem& problem, const Row& row);

// Number of CTAs that share one request's KV so that the GPU is full: every CTA keeps two tiles at least, all CTAs are
// resident at once, none is left without work while another has two more tiles. 1 when there is nothing to gain.
int64_t wanted_splits(const Problem& problem, const Row& row, const Device& device);

// Largest split of at most `wanted` whose clusters of that size are all resident at once; 1 if none.
int64_t cluster_splits(const Problem& problem, const Row& row, const Device& device, int64_t wanted);

// Scratch bytes that no launch of the manifest's rows for the problem's dtypes and head dims exceeds on `device`,
// whatever batch, lengths and window: a split never has more CTAs than are resident at once.
int64_t scratch_bound(const Problem& problem, const Manifest& manifest, const Device& device);

// The launch with `num_ctas_kv` CTAs for each request's KV.
Shape launch_shape(const Problem& problem, const Row& row, int64_t num_ctas_kv);

}  // namespace fmha
