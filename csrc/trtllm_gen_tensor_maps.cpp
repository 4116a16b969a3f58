// Tensor maps of NVIDIA's kernels: how their host code lays Q, K, V, O and block scales out for TMA.
#include "trtllm_gen_tensor_maps.h"

#include <algorithm>
#include <cstddef>

#include "kernel_params.h"

namespace fmha::trtllm_gen {
namespace {

constexpr int kTypeUint8 = 0, kTypeFloat16 = 6, kTypeBfloat16 = 9, kType16U4Align16B = 14;  // CU_TENSOR_MAP_DATA_TYPE_*
constexpr int kSwizzle32B = 1, kSwizzle64B = 2, kSwizzle128B = 3;
constexpr int kL2Promotion128B = 2;
constexpr int64_t kSwizzleBytes = 128;
constexpr int64_t kScaleBlock = 16;  // elements that share one scale of an E2M1 tensor

int64_t elements_per_swizzle_row(DataType type) { return kSwizzleBytes * 8 / bits(type); }

struct Layout {
  int rank;
  int64_t dims[5];
  int64_t strides[4];  // elements of the TMA type
  int64_t box[5];
};

// `unpack`: E2M1 values are widened by TMA on their way into shared memory.
TensorMapArgs make_map(size_t slot, DataType type, uint64_t addr, const Layout& layout, bool swizzle, bool unpack) {
  TensorMapArgs args{};
  args.slot = static_cast<int>(slot);
  args.dtype = type == DataType::kBf16             ? kTypeBfloat16
               : type == DataType::kFp16           ? kTypeFloat16
               : type == DataType::kE2m1 && unpack ? kType16U4Align16B
                                                   : kTypeUint8;
  args.rank = layout.rank;
  args.addr = addr;
  const int64_t stride_bytes = std::max(bits(type), 8) / 8;
  for (int i = 0; i < layout.rank; ++i) {
    args.dims[i] = static_cast<uint64_t>(layout.dims[i]);
    args.box[i] = static_cast<uint32_t>(layout.box[i]);
    args.elem_strides[i] = 1;
    if (i == 0) continue;
    args.strides[i - 1] = static_cast<uint64_t>(layout.strides[i - 1] * stride_bytes);
    // A dimension of size 1 is never stepped over, so a stride that TMA would refuse there means nothing.
    if (layout.dims[i] == 1 && !is_valid_stride(args.strides[i - 1])) args.strides[i - 1] = 0;
  }
  const int64_t inner_bytes = layout.box[0] * bits(type) / 8;
  if (!swizzle) {
    args.swizzle = 0;
  } else if (args.dtype == kType16U4Align16B || inner_bytes % 128 == 0) {
    args.swizzle = kSwizzle128B;
  } else {
    args.swizzle = inner_bytes % 64 == 0 ? kSwizzle64B : kSwizzle32B;
  }
  args.l2 = kL2Promotion128B;
  return args;
}

// What K and V have in common.
struct KvLayout {
  int64_t max_dim;   // of K's and V's head dims
  int64_t keys;      // of a tile that one box covers
  int64_t per_byte;  // elements that share a byte
  bool in_tmem;      // E2M1 stays packed until tensor memory
  bool swizzle;
};

KvLayout kv_layout(const Problem& p, const Row& row) {
  KvLayout kv;
  kv.max_dim = std::max(p.head_dim_qk, p.head_dim_v);
  kv.keys = p.layout == QkvLayout::kPagedKv ? std::min<int64_t>(p.page_size, row.tile_size_kv) : row.tile_size_kv;
  kv.per_byte = p.dtype_k == DataType::kE2m1 ? 2 : 1;
  kv.in_tmem = p.dtype_k == DataType::kE2m1 && p.dtype_q == DataType::kE4m3 && kv.max_dim >= 128 &&
               row.kernel_type == KernelType::kSwapsMmaAb;
  kv.swizzle = kv.in_tmem || p.dtype_k == p.dtype_q;
  return kv;
}

TensorMapArgs map_of_q(const Problem& p, const Row& row, uint64_t addr) {
  const int64_t group = p.num_heads_q / p.num_heads_kv;
  const int64_t heads = row.groups_heads_q ? std::min<int64_t>(row.tile_size_q, group) : 1;
  const int64_t head_stride = p.stride_q.head != 0 ? p.stride_q.head : p.head_dim_qk;
  const int64_t token_stride = p.stride_q.token != 0 ? p.stride_q.token : p.num_heads_q * p.head_dim_qk;
  int64_t box_heads = heads, box_tokens = row.tile_size_q / heads;
  if (row.groups_heads_q && !row.groups_tokens_heads_q) {
    box_heads = row.tile_size_q;
    box_tokens = 1;
  }
  const int64_t columns = std::min(elements_per_swizzle_row(p.dtype_q), p.head_dim_qk);
  const Layout layout{4,
                      {p.head_dim_qk, heads, p.num_heads_q / heads, p.sum_seq_lens_q},
                      {head_stride, heads * head_stride, token_stride},
                      {columns, box_heads, 1, box_tokens}};
  return make_map(offsetof(KernelParams, tmaQ_), p.dtype_q, addr, layout, true, false);
}

struct KvTensor {
  size_t slot;
  DataType type;
  int64_t head_dim;
  TensorStrides stride;
  uint64_t addr;
};

TensorMapArgs map_of_kv(const Problem& p, const Row& row, const KvLayout& kv, const KvTensor& t, int64_t pool_pages) {
  const bool paged = p.layout == QkvLayout::kPagedKv;
  const int64_t fold = kv_reshape_factor(p, row);
  const int64_t dim = paged ? kv.max_dim : t.head_dim;
  const bool packed = kv.per_byte == 2 && !kv.in_tmem;
  const int64_t keys = paged ? p.page_size : p.sum_seq_lens_kv;
  // A ragged tensor has no batch: one step of that dimension, never taken.
  const int64_t batch_stride = paged ? t.stride.page : std::max<int64_t>(0, t.stride.page);
  int64_t columns = std::min({elements_per_swizzle_row(p.dtype_k), kv.max_dim, int64_t{128}});
  if (packed) columns /= 2;
  columns *= fold;
  if (t.type != p.dtype_k && !kv.in_tmem) columns = columns * bits(p.dtype_k) / bits(t.type);
  const bool sparse = p.sparse_mla != SparseMlaType::kNone;
  const Layout layout{4,
                      {(packed ? dim / 2 : dim) * fold, keys / fold, p.num_heads_kv, paged ? pool_pages : 1},
                      {t.stride.token / kv.per_byte * fold, t.stride.head / kv.per_byte, batch_stride / kv.per_byte},
                      {columns, sparse ? 1 : kv.keys / fold, 1, 1}};
  return make_map(t.slot, t.type, t.addr, layout, kv.swizzle, kv.in_tmem);
}

// Sparse attention gathers single tokens of K, from all of memory.
TensorMapArgs map_of_tokens(const Problem& p, const KvLayout& kv, size_t slot, uint64_t addr) {
  const int64_t columns = std::min({elements_per_swizzle_row(p.dtype_k), kv.max_dim, int64_t{128}});
  const Layout layout{2, {p.head_dim_qk, INT32_MAX}, {p.head_dim_qk}, {columns, 1}};
  return make_map(slot, p.dtype_k, addr, layout, kv.swizzle, kv.in_tmem);
}

TensorMapArgs map_of_scales(const Problem& p, const KvLayout& kv, size_t slot, uint64_t addr, int64_t pool_pages) {
  const int64_t scales = kv.max_dim / kScaleBlock;
  const int64_t fold = std::min(128 / scales, kv.keys);
  const Layout layout{4,
                      {scales * fold, p.page_size / fold, p.num_heads_kv, pool_pages},
                      {scales * fold, p.stride_kv_sf_head, p.stride_kv_sf_page},
                      {scales * fold, kv.keys / fold, 1, 1}};
  return make_map(slot, DataType::kE4m3, addr, layout, false, false);
}

TensorMapArgs map_of_o(const Problem& p, const Row& row, uint64_t addr) {
  const int64_t group = p.num_heads_q / p.num_heads_kv;
  const int64_t columns = std::min(elements_per_swizzle_row(p.dtype_q), p.head_dim_qk);
  const Layout layout{5,
                      {p.head_dim_v, p.sum_seq_lens_q, p.num_heads_kv, group, 1},
                      {p.num_heads_q * p.head_dim_v, p.head_dim_v, p.num_heads_kv * p.head_dim_v, 0},
                      {columns, row.tile_size_q, 1, 1, 1}};
  return make_map(offsetof(KernelParams, tmaO_), p.dtype_q, addr, layout, true, false);
}

}  // namespace

int64_t kv_reshape_factor(const Problem& p, const Row& row) {
  const KvLayout kv = kv_layout(p, row);
  const bool dense = p.stride_k.token / kv.per_byte == p.head_dim_qk / kv.per_byte &&
                     p.stride_v.token / kv.per_byte == p.head_dim_v / kv.per_byte;
  if (p.layout != QkvLayout::kPagedKv || p.head_dim_qk != p.head_dim_v || kv.swizzle || !dense) return 1;
  const int64_t row_bytes = std::max<int64_t>(1, kv.max_dim * bits(p.dtype_k) / 8);
  return std::max<int64_t>(1, std::min({128 / kv.max_dim, 128 / row_bytes, kv.keys}));
}

int64_t num_pages_in_pool(const Problem& p, const Buffers& b) {
  if (p.layout != QkvLayout::kPagedKv) return 0;
  const int64_t pages = b.k == b.v ? p.num_pages_k : 2 * p.num_pages_k;
  return pages != 0 ? pages : p.max_pages_per_seq * 2 * p.batch_size;
}

int encode_args(const Problem& p, const Row& row, const Buffers& b, TensorMapArgs out[kMaxTensorMaps]) {
  const KvLayout kv = kv_layout(p, row);
  const int64_t pool_pages = num_pages_in_pool(p, b);
  const bool sparse = p.sparse_mla != SparseMlaType::kNone;
  int count = 0;
  out[count++] = map_of_q(p, row, b.q);
  const KvTensor k{offsetof(KernelParams, tmaK_), p.dtype_k, p.head_dim_qk, p.stride_k, b.k};
  out[count++] = sparse ? map_of_tokens(p, kv, k.slot, b.k) : map_of_kv(p, row, kv, k, pool_pages);
  if (p.has_sliding_window_pool) {
    out[count++] = map_of_tokens(p, kv, offsetof(KernelParams, tmaKSlidingWindowKvPool_), b.sliding_window_pool);
  }
  const KvTensor v{offsetof(KernelParams, tmaV_), p.dtype_v, p.head_dim_v, p.stride_v, b.v};
  out[count++] = map_of_kv(p, row, kv, v, pool_pages);
  if (p.dtype_k == DataType::kE2m1) {
    out[count++] = map_of_scales(p, kv, offsetof(KernelParams, tmaKSf_), b.k_sf, pool_pages);
    out[count++] = map_of_scales(p, kv, offsetof(KernelParams, tmaVSf_), b.v_sf, pool_pages);
  }
  out[count++] = map_of_o(p, row, b.o);
  return count;
}

}  // namespace fmha::trtllm_gen
