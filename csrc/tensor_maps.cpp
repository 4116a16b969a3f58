#include "tensor_maps.h"

#include <algorithm>
#include <cstddef>

#include "kernel_params.h"
#include "shape.h"
#include "trtllm_gen_tensor_maps.h"

namespace fmha {
namespace {

constexpr int kTypeFloat16 = 6;  // CU_TENSOR_MAP_DATA_TYPE_*
constexpr int kTypeBfloat16 = 9;
constexpr int kSwizzle128B = 3;
constexpr int kL2Promotion128B = 2;
constexpr int64_t kElementBytes = 2;
constexpr int64_t kSwizzleElements = 128 / kElementBytes;  // one 128-byte row of the swizzle pattern
constexpr uint64_t kStrideLimit = uint64_t{1} << 40;

// Strides are given in elements for dims 1..3. A dimension of size 1 is never stepped over, so whatever the caller's
// tensor says there is replaced by the packed stride: one descriptor for one memory, and no fault for a meaningless
// number.
TensorMapArgs map_of_rank_4(size_t slot, DataType dtype, uint64_t addr, const int64_t (&dims)[4],
                            const int64_t (&strides)[3], const int64_t (&box)[4]) {
  TensorMapArgs args{};
  args.slot = static_cast<int>(slot);
  args.dtype = dtype == DataType::kBf16 ? kTypeBfloat16 : kTypeFloat16;
  args.rank = 4;
  args.addr = addr;
  args.swizzle = kSwizzle128B;
  args.l2 = kL2Promotion128B;
  for (int i = 0; i < 4; ++i) {
    args.dims[i] = static_cast<uint64_t>(dims[i]);
    args.box[i] = static_cast<uint32_t>(box[i]);
    args.elem_strides[i] = 1;
  }
  uint64_t packed = static_cast<uint64_t>(dims[0] * kElementBytes);
  for (int i = 0; i < 3; ++i) {
    args.strides[i] =
        dims[i + 1] == 1 ? std::min(packed, kStrideLimit - 16) : static_cast<uint64_t>(strides[i] * kElementBytes);
    packed = args.strides[i] * args.dims[i + 1];
  }
  return args;
}

}  // namespace

int encode_args(const Problem& p, const Row& row, const Buffers& buffers, TensorMapArgs out[kMaxTensorMaps]) {
  if (is_trtllm_gen(row)) return trtllm_gen::encode_args(p, row, buffers, out);
  const int64_t group = p.num_heads_q / p.num_heads_kv;
  const int64_t keys = std::min<int64_t>(p.page_size, row.tile_size_kv);
  const int64_t columns_qk = std::min<int64_t>(kSwizzleElements, p.head_dim_qk);
  const int64_t columns_v = std::min<int64_t>(kSwizzleElements, p.head_dim_v);
  // Rows of a Q tile come out token-major, the heads of the group inside.
  out[0] = map_of_rank_4(
      offsetof(KernelParams, tmaQ_), p.dtype_q, buffers.q, {p.head_dim_qk, group, p.num_heads_kv, p.sum_seq_lens_q},
      {p.stride_q.head, group * p.stride_q.head, p.stride_q.token}, {columns_qk, group, 1, tokens_per_cta(p, row)});
  out[1] = map_of_rank_4(offsetof(KernelParams, tmaK_), p.dtype_k, buffers.k,
                         {p.head_dim_qk, p.page_size, p.num_heads_kv, p.num_pages_k},
                         {p.stride_k.token, p.stride_k.head, p.stride_k.page}, {columns_qk, keys, 1, 1});
  out[2] = map_of_rank_4(offsetof(KernelParams, tmaV_), p.dtype_v, buffers.v,
                         {p.head_dim_v, p.page_size, p.num_heads_kv, p.num_pages_v},
                         {p.stride_v.token, p.stride_v.head, p.stride_v.page}, {columns_v, keys, 1, 1});
  return 3;
}

std::string tensor_map_fault(const TensorMapArgs& args) {
  const auto say = [&](const std::string& what, auto value, const char* rule) {
    return std::string(slot_name(args.slot)) + ": " + what + " is " + std::to_string(value) + ", must be " + rule;
  };
  if (args.addr % 16 != 0) return say("address", args.addr, "16-byte aligned");
  for (int i = 0; i < args.rank; ++i) {
    const std::string dim = "dimension " + std::to_string(i);
    if (args.dims[i] < 1 || args.dims[i] > uint64_t{1} << 32) return say(dim, args.dims[i], "1..2^32");
    if (args.box[i] < 1 || args.box[i] > 256) return say("box of " + dim, args.box[i], "1..256");
    if (i == 0) continue;
    const uint64_t stride = args.strides[i - 1];
    if (stride % 16 != 0) return say("stride of " + dim, static_cast<int64_t>(stride), "a multiple of 16 bytes");
    if (stride >= kStrideLimit) return say("stride of " + dim, static_cast<int64_t>(stride), "0..2^40 bytes");
  }
  return {};
}

std::string first_tensor_map_fault(const Problem& p, const Row& row) {
  TensorMapArgs maps[kMaxTensorMaps];
  const int count = encode_args(p, row, Buffers{}, maps);
  std::string fault;
  for (int i = 0; i < count && fault.empty(); ++i) fault = tensor_map_fault(maps[i]);
  return fault;
}

const char* slot_name(int slot) {
  switch (slot) {
    case offsetof(KernelParams, tmaQ_):
      return "tmaQ_";
    case offsetof(KernelParams, tmaK_):
      return "tmaK_";
    case offsetof(KernelParams, tmaKSlidingWindowKvPool_):
      return "tmaKSlidingWindowKvPool_";
    case offsetof(KernelParams, tmaV_):
      return "tmaV_";
    case offsetof(KernelParams, tmaO_):
      return "tmaO_";
    case offsetof(KernelParams, tmaKSf_):
      return "tmaKSf_";
    case offsetof(KernelParams, tmaVSf_):
      return "tmaVSf_";
    default:
      return "";
  }
}

}  // namespace fmha
