#include "kernel_index.h"

#include <string>

namespace fmha {
namespace {

constexpr int kFamilySm = 10100;  // sm_100f: runs on 100 and 103

uint64_t log2_of(int value) {
  uint64_t log2 = 0;
  while (value >>= 1) ++log2;
  return log2;
}

// 0 for no blocks, so that one element a block differs from it.
uint64_t log2_plus_1(int value) { return value == 0 ? 0 : log2_of(value) + 1; }

template <class T>
uint64_t at(T value, int bit) {
  return static_cast<uint64_t>(value) << bit;
}

}  // namespace

KernelKey key_of(const Row& r) {
  KernelKey key;
  key.choice = at(r.layout, 0) | at(r.mask, 4) | at(r.kernel_type, 8) | at(r.scheduler, 12) |
               at(r.multi_ctas_kv_mode, 16) | at(r.head_dim_per_cta_v / 8, 18) | at(r.head_dim_qk / 8, 26) |
               at(r.head_dim_v / 8, 34) | at(r.tile_size_kv / 64, 42) | at(log2_of(r.num_tokens_per_page), 44) |
               at(log2_of(r.tile_size_q), 49) | at(r.reuse_smem_k_for_v, 53) | at(r.uses_2cta_mma, 54) |
               at(r.sparse_mla, 55) | at(r.skips_softmax, 57) | at(r.dynamic_page, 58);
  const uint64_t types = at(r.dtype_q, 0) | at(r.dtype_k, 4) | at(r.dtype_v, 8) | at(r.dtype_o, 12) |
                         at(log2_plus_1(r.sage_q), 16) | at(log2_plus_1(r.sage_k), 20) | at(log2_plus_1(r.sage_p), 24) |
                         at(log2_plus_1(r.sage_v), 28);
  key.types = static_cast<uint32_t>(types);
  return key;
}

KernelIndex::KernelIndex(const std::vector<Row>& rows) : rows_(&rows) {
  size_t buckets = 16;
  while (buckets < rows.size()) buckets *= 2;
  first_.assign(buckets, -1);
  next_.reserve(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const KernelKey key = key_of(rows[i]);
    int32_t& first = first_[bucket_of(key)];
    for (int32_t other = first; other >= 0; other = next_[other]) {
      if (rows[other].sm == rows[i].sm && key_of(rows[other]) == key) {
        throw ManifestError("kernel manifest: " + std::string(rows[other].name) + " and " + std::string(rows[i].name) +
                            " have the same key");
      }
    }
    next_.push_back(first);
    first = static_cast<int32_t>(i);
  }
}

int KernelIndex::find(const KernelKey& key, int sm) const {
  if (rows_ == nullptr || (sm != 100 && sm != 103)) return -1;
  int family = -1;
  for (int32_t i = first_[bucket_of(key)]; i >= 0; i = next_[i]) {
    const Row& row = (*rows_)[i];
    if ((row.sm != sm && row.sm != kFamilySm) || !(key_of(row) == key)) continue;
    if (row.sm == sm) return i;
    family = i;
  }
  return family;
}

size_t KernelIndex::bucket_of(const KernelKey& key) const {
  const uint64_t hash = (key.choice ^ (uint64_t{key.types} << 29)) * 0x9E3779B97F4A7C15u;
  return (hash ^ hash >> 32) & (first_.size() - 1);
}

}  // namespace fmha
