// One row of the kernel manifest: the same columns for every family.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "problem.h"

namespace fmha {

// The columns, stated once: struct, packed layout, range checks, writer and Python attributes are made from these
// lists.
#define FMHA_ROW_STRINGS(X)                    \
  X(name)   /* unique in the manifest */       \
  X(cubin)  /* artifact path in cubins.lock */ \
  X(symbol) /* entry point in the cubin */
#define FMHA_ROW_ENUMS(X)                \
  X(DataType, dtype_q)                   \
  X(DataType, dtype_k)                   \
  X(DataType, dtype_v)                   \
  X(DataType, dtype_o)                   \
  X(QkvLayout, layout)                   \
  X(MaskType, mask)                      \
  X(KernelType, kernel_type)             \
  X(TileScheduler, scheduler)            \
  X(MultiCtasKvMode, multi_ctas_kv_mode) \
  X(SparseMlaType, sparse_mla)
// Type in the packed table, name, smallest and largest value.
#define FMHA_ROW_INTS(X)                                                 \
  X(uint16_t, sm, 1, 65535) /* 90 = sm_90a, 100, 103, 10100 = sm_100f */ \
  X(uint16_t, tile_size_q, 1, 1024)                                      \
  X(uint16_t, tile_size_kv, 1, 1024)                                     \
  X(uint16_t, step_q, 1, 1024)                                           \
  X(uint16_t, step_kv, 1, 1024)                                          \
  X(uint16_t, head_dim_per_cta_v, 1, 1024)                               \
  X(uint16_t, head_dim_qk, 1, 1024)                                      \
  X(uint16_t, head_dim_v, 1, 1024)                                       \
  X(uint16_t, num_tokens_per_page, 0, 32768)                             \
  X(uint16_t, threads, 1, 1024)                                          \
  X(uint32_t, smem_bytes, 0, 1 << 20)                                    \
  X(uint16_t, sage_q, 0, 1024)                                           \
  X(uint16_t, sage_k, 0, 1024)                                           \
  X(uint16_t, sage_p, 0, 1024)                                           \
  X(uint16_t, sage_v, 0, 1024)
#define FMHA_ROW_FLAGS(X)  \
  X(groups_heads_q)        \
  X(groups_tokens_heads_q) \
  X(dynamic_page)          \
  X(reuse_smem_k_for_v)    \
  X(uses_2cta_mma)         \
  X(skips_softmax)

struct Row {
#define FMHA_MEMBER(name) std::string_view name;
  FMHA_ROW_STRINGS(FMHA_MEMBER)
#undef FMHA_MEMBER
#define FMHA_MEMBER(type, name) type name{};
  FMHA_ROW_ENUMS(FMHA_MEMBER)
#undef FMHA_MEMBER
#define FMHA_MEMBER(packed, name, low, high) int name = 0;
  FMHA_ROW_INTS(FMHA_MEMBER)
#undef FMHA_MEMBER
#define FMHA_MEMBER(name) bool name = false;
  FMHA_ROW_FLAGS(FMHA_MEMBER)
#undef FMHA_MEMBER
};

// Dispatch differs by family in few places; a row tells by its architecture which one it belongs to.
inline bool is_trtllm_gen(const Row& row) { return row.sm == 100 || row.sm == 103 || row.sm == 10100; }

// Bytes that are no manifest.
struct ManifestError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace fmha
