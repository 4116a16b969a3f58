#include "kernel_index.h"

#include <string>

namespace fmha {
namespace {

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

KernelIndex::KernelIndex(const std::vector<Row>& rows) {
  size_t size = 16;
  while (size < rows.size() * 2) size *= 2;
  slots_.resize(size);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    const KernelKey key = key_of(row);
    Slot& slot = slots_[slot_of(key)];
    int& entry = row.sm == 100 ? slot.sm_100 : row.sm == 103 ? slot.sm_103 : slot.family;
    if (entry >= 0) {
      throw ManifestError("kernel manifest: " + std::string(rows[entry].name) + " and " + std::string(row.name) +
                          " have the same key");
    }
    slot.key = key;
    entry = static_cast<int>(i);
  }
}

int KernelIndex::find(const KernelKey& key, int sm) const {
  const Slot& slot = slots_[slot_of(key)];
  if (sm == 100 && slot.sm_100 >= 0) return slot.sm_100;
  if (sm == 103 && slot.sm_103 >= 0) return slot.sm_103;
  return sm == 100 || sm == 103 ? slot.family : -1;
}

size_t KernelIndex::slot_of(const KernelKey& key) const {
  uint64_t hash = (key.choice ^ (uint64_t{key.types} << 29)) * 0x9E3779B97F4A7C15u;
  size_t i = (hash ^ hash >> 32) & (slots_.size() - 1);
  while (!slots_[i].empty() && !(slots_[i].key == key)) i = (i + 1) & (slots_.size() - 1);
  return i;
}

}  // namespace fmha
