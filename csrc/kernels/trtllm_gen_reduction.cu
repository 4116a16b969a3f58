// Joins the partial results of a trtllm-gen attention kernel whose CTAs split the keys of a request
// (MultiCtasKvMode::kGmemReductionWithSeparateKernel). One output dtype a compilation; tools/build_cubins.py passes the
// macros.
//
// What the attention kernel leaves, for a tile of `tile_size_q` rows and `columns` columns of V:
//   ptrPartialStats  float2   [batch, head CTAs * V CTAs, mMaxNumCtasQ, mMaxNumCtasKv, tile]
//   ptrPartialO      16 bits  [the same, columns]
// A row is a query head of a token, token-major. `max` is that of the unscaled logits, -FLT_MAX where every key of the
// split is masked; `sum` and the output are not normalised. CTAs beyond the keys of the tile write nothing. Sinks, the
// output and the statistics are left to this kernel.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cfloat>
#include <cmath>

#include "../kernel_params.h"
#include "programmatic_launch.cuh"

namespace fmha {
namespace {

enum class Output { kBf16, kFp16, kE4m3 };
constexpr Output kOutput = Output::FMHA_OUTPUT;

constexpr int kThreads = 512;
constexpr int kValues = 8;    // of a row, in one thread: 16 bytes of a partial result
constexpr int kTileKv = 128;  // keys in a step of every attention kernel that this one follows
constexpr int kUnroll = 4;    // loads of partial results in flight; deeper, through cp.async, was slower on an H200
constexpr unsigned kWarp = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The tile of this CTA.
struct Tile {
  int64_t first_token;  // row of the query tensor
  int rows;             // that hold a token
  int heads;            // rows of one token
  int first_head;
  int splits;  // that the attention kernel wrote
};

__device__ __forceinline__ Tile find_tile(KernelParams const& p, bool is_token_sparse, bool has_top_k_lens, int batch,
                                          int cta_q, int head_cta, int num_head_ctas) {
  Tile tile;
  const int64_t offset =
      p.ptrCumSeqLensQ != nullptr ? __ldcg(p.ptrCumSeqLensQ + batch) : static_cast<int64_t>(batch) * p.mMaxSeqLenQ;
  const int seq_len_q =
      p.ptrCumSeqLensQ != nullptr ? static_cast<int>(__ldcg(p.ptrCumSeqLensQ + batch + 1) - offset) : p.mMaxSeqLenQ;
  const int begin = cta_q * p.mNumTokensPerCtaQ;
  const int tokens = max(0, min(seq_len_q - begin, p.mNumTokensPerCtaQ));
  tile.first_token = offset + begin;
  tile.heads = p.mNumHeadsQ / num_head_ctas;
  tile.first_head = head_cta * tile.heads;
  tile.rows = tokens * tile.heads;
  if (tokens == 0) {
    tile.splits = 0;
    return tile;
  }
  int keys;  // that the last token of the tile sees
  if (has_top_k_lens) {
    keys = __ldcg(p.ptrSparseMlaTopKLens + tile.first_token);
  } else {
    keys = __ldcg(p.ptrSeqLensKv + batch) - seq_len_q + begin + tokens;
    if (is_token_sparse) keys = min(keys, p.mSparseAttnTopK);
  }
  tile.splits = keys <= 0 ? 0 : min((keys - 1) / kTileKv + 1, p.mMaxNumCtasKv);
  return tile;
}

// acc += weight * partial, in float32.
__device__ __forceinline__ void accumulate(uint4 partial, float weight, float (&acc)[kValues]) {
  const unsigned words[4] = {partial.x, partial.y, partial.z, partial.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 pair;
    if constexpr (kOutput == Output::kBf16) {
      pair = make_float2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u));
    } else {
      pair = __half22float2(reinterpret_cast<__half2 const&>(words[i]));
    }
    acc[2 * i] = fmaf(pair.x, weight, acc[2 * i]);
    acc[2 * i + 1] = fmaf(pair.y, weight, acc[2 * i + 1]);
  }
}

template <class Pair>
__device__ __forceinline__ unsigned bits(Pair pair) {
  static_assert(sizeof(Pair) == 4, "not a pair of 16-bit values");
  return reinterpret_cast<unsigned const&>(pair);
}

// Stores 8 values at element `at` of the output.
__device__ __forceinline__ void store(void* out, int64_t at, float const (&v)[kValues]) {
  if constexpr (kOutput == Output::kBf16) {
    static_cast<uint4*>(out)[at / kValues] =
        make_uint4(bits(__floats2bfloat162_rn(v[0], v[1])), bits(__floats2bfloat162_rn(v[2], v[3])),
                   bits(__floats2bfloat162_rn(v[4], v[5])), bits(__floats2bfloat162_rn(v[6], v[7])));
  } else if constexpr (kOutput == Output::kFp16) {
    static_cast<uint4*>(out)[at / kValues] =
        make_uint4(bits(__floats2half2_rn(v[0], v[1])), bits(__floats2half2_rn(v[2], v[3])),
                   bits(__floats2half2_rn(v[4], v[5])), bits(__floats2half2_rn(v[6], v[7])));
  } else {
    unsigned words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned pair = __nv_cvt_float2_to_fp8x2(make_float2(v[2 * i], v[2 * i + 1]), __NV_SATFINITE, __NV_E4M3);
      words[i / 2] |= pair << 16 * (i % 2);
    }
    static_cast<uint2*>(out)[at / kValues] = make_uint2(words[0], words[1]);
  }
}

}  // namespace
}  // namespace fmha

// Grid: (mMaxNumCtasQ * num_parts, num_head_ctas * num_head_dim_ctas, batch). The first seven scalars are those of
// NVIDIA's kernel; `tile_size_q` and `sum_scale` (448 when the attention kernel multiplied its probabilities by that to
// fit them into E4M3, else 1: its sums carry it, its outputs do not) are template arguments there.
extern "C" __global__ void __launch_bounds__(fmha::kThreads, 2)
    FMHA_SYMBOL(__grid_constant__ const fmha::KernelParams p, bool is_token_sparse, bool groups_tokens_heads_q,
                bool has_top_k_lens, int num_parts, int num_head_ctas, int head_dim_v, int num_head_dim_ctas,
                int tile_size_q, float sum_scale) {
  using namespace fmha;
  wait_for_earlier_kernels();
  const int cta_q = blockIdx.x % p.mMaxNumCtasQ, part = blockIdx.x / p.mMaxNumCtasQ;
  const int head_cta = blockIdx.y / num_head_dim_ctas, head_dim_cta = blockIdx.y % num_head_dim_ctas;
  const Tile tile = find_tile(p, is_token_sparse, has_top_k_lens, blockIdx.z, cta_q, head_cta, num_head_ctas);

  const int columns = head_dim_v / num_head_dim_ctas;
  const int lanes_log2 = __ffs(columns / kValues) - 1;  // threads of a row: a power of two, 8 to 64
  const int rows_per_slice = kThreads >> lanes_log2;
  const int num_slices = (tile.rows + rows_per_slice - 1) / rows_per_slice;
  const int column = (static_cast<int>(threadIdx.x) & ((1 << lanes_log2) - 1)) * kValues;
  // Lanes of one warp that share a row share the work on its statistics.
  const int segment = min(1 << lanes_log2, 32);
  const int lane = static_cast<int>(threadIdx.x) & (segment - 1);

  const int64_t partial =
      ((static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * p.mMaxNumCtasQ + cta_q) * p.mMaxNumCtasKv;
  float2 const* stats = reinterpret_cast<float2 const*>(p.ptrPartialStats) + partial * tile_size_q;
  uint4 const* outputs = static_cast<uint4 const*>(p.ptrPartialO) + partial * tile_size_q * columns / kValues;
  const int split_stride = tile_size_q << lanes_log2;
  const float scale = p.ptrScaleSoftmaxLog2 != nullptr ? __ldcg(p.ptrScaleSoftmaxLog2) : p.mScaleSoftmaxLog2;

  for (int slice = part; slice < num_slices; slice += num_parts) {
    const int row = slice * rows_per_slice + (static_cast<int>(threadIdx.x) >> lanes_log2);
    const bool valid = row < tile.rows;
    const int safe_row = min(row, tile.rows - 1);
    const int token = groups_tokens_heads_q ? safe_row / tile.heads : 0;
    const int head = tile.first_head + safe_row - token * tile.heads;
    float2 const* row_stats = stats + safe_row;
    uint4 const* next = outputs + (safe_row << lanes_log2) + column / kValues;

    float top = -FLT_MAX;
#pragma unroll 2
    for (int s = lane; s < tile.splits; s += segment) top = fmaxf(top, __ldcg(row_stats + s * tile_size_q).x);
    for (int d = segment / 2; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(kWarp, top, d));
    const bool has_sink = p.ptrAttentionSinks != nullptr;
    const float sink = has_sink ? __ldcg(p.ptrAttentionSinks + head) * kLog2E : 0.f;
    const float base = has_sink ? fmaxf(top * scale, sink) : top * scale;

    float sum = 0.f, acc[kValues] = {};
#pragma unroll 1
    for (int begin = 0; begin < tile.splits; begin += segment) {
      float weight = 0.f;
      if (begin + lane < tile.splits) {
        const float2 own = __ldcg(row_stats + (begin + lane) * tile_size_q);
        // A split in which the row sees no key counts for nothing, whatever it left; a NaN is passed on.
        if (own.x > -FLT_MAX || isnan(own.x) || isnan(own.y)) {
          weight = exp2f(fmaf(own.x, scale, -base));
          sum = fmaf(own.y, weight, sum);
        }
      }
      const int last = min(segment, tile.splits - begin) - 1;
#pragma unroll 1
      for (int i = 0; i <= last; i += kUnroll) {
        uint4 values[kUnroll];
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) values[j] = __ldcg(next + min(i + j, last) * split_stride);
#pragma unroll
        for (int j = 0; j < kUnroll; ++j) {
          const float w = __shfl_sync(kWarp, weight, i + j, segment);  // 0 beyond the last
          accumulate(w == 0.f ? make_uint4(0, 0, 0, 0) : values[j], w, acc);
        }
      }
      next += segment * split_stride;
    }
    for (int d = segment / 2; d > 0; d /= 2) sum += __shfl_xor_sync(kWarp, sum, d);
    if (slice + num_parts >= num_slices) let_next_kernel_start();

    const bool sees_keys = top > -FLT_MAX || isnan(sum);
    if (has_sink) sum = fmaf(exp2f(sink - base), sum_scale, sum);
    const float inverse = sees_keys ? sum_scale / sum : 0.f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] *= inverse;

    const int64_t row_out = (tile.first_token + token) * p.mNumHeadsQ + head;
    if (p.ptrSoftmaxStats != nullptr && valid && column == 0 && head_dim_cta == 0) {
      p.ptrSoftmaxStats[row_out] =
          sees_keys ? SoftmaxStats{base * kLn2, sum / sum_scale} : SoftmaxStats{-INFINITY, 0.f};
    }
    if (valid) store(p.ptrO, row_out * head_dim_v + head_dim_cta * columns + column, acc);
  }
}
