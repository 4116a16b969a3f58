// Swapped operand order (8, 16 or 32 packed rows): S^T = K Q^T, O^T = V^T P^T, so that keys and head_dim fill the 64
// rows of wgmma and few queries are its columns. The two warpgroups take alternate tiles.
#pragma once

#include "sm90_decode.cuh"
#include "sm90_wgmma.cuh"

namespace fmha::sm90 {

// Columns of a thread: 8 j + 2 (lane % 4) + e, kept at index 2 j + e. Lanes with equal lane % 4 hold the same ones.
template <int kColumns, class Op>
__device__ __forceinline__ void reduce_lanes(float (&values)[kColumns], Op op) {
#pragma unroll
  for (int i = 4; i < 32; i *= 2) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) values[c] = op(values[c], __shfl_xor_sync(0xffffffff, values[c], i));
  }
}

// Then over the four warps of the warpgroup; all threads get the result. `scratch` is float [4][kColumns * 4].
template <int kColumns, class Op>
__device__ __forceinline__ void reduce_warps(float (&values)[kColumns], float* scratch, int barrier, Op op) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  if (lane < 4) {
#pragma unroll
    for (int c = 0; c < kColumns; c += 2) {
      *reinterpret_cast<float2*>(scratch + warp * kColumns * 4 + c * 4 + lane * 2) =
          make_float2(values[c], values[c + 1]);
    }
  }
  named_barrier(barrier, kWarpgroup);
#pragma unroll
  for (int c = 0; c < kColumns; c += 2) {
    float2 v = *reinterpret_cast<float2*>(scratch + c * 4 + lane % 4 * 2);
#pragma unroll
    for (int w = 1; w < 4; ++w) {
      const float2 other = *reinterpret_cast<float2*>(scratch + w * kColumns * 4 + c * 4 + lane % 4 * 2);
      v = make_float2(op(v.x, other.x), op(v.y, other.y));
    }
    values[c] = v.x, values[c + 1] = v.y;
  }
}

template <class C>
__device__ __forceinline__ void consume_swaps(KernelParams const& params, Work const& work, unsigned char* smem,
                                              float scale_log2) {
  constexpr int kBlocks = C::kTileKv / 64;
  constexpr int kValues = C::kTileQ / 2;   // of an accumulator of 64 rows
  constexpr int kColumns = C::kTileQ / 4;  // of a thread
  constexpr int kPBlockBytes = C::kTileQ * 128;
  const auto maximum = [](float a, float b) { return fmaxf(a, b); };
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32 % 4;
  const int warpgroup = threadIdx.x / kWarpgroup;
  Ring<C> ring{smem_address(smem), warpgroup};
  const int barrier = 2 + warpgroup;
  const uint32_t p_address = ring.smem + C::kPOffset + warpgroup * C::kPBytes;
  float* scratch = reinterpret_cast<float*>(smem + C::kColumnOffset) + warpgroup * 4 * C::kTileQ;
  int2 const* ranges = reinterpret_cast<int2 const*>(smem + C::kRangesOffset);
  // Where this lane's row of its 8x8 matrix of P^T goes: query lane % 8, 8 keys 16 warp + 8 (lane / 8 % 2), swizzled.
  const uint32_t p_row = p_address + (lane / 16 * 8 + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16);

  float o[C::kChunks][kValues];
#pragma unroll
  for (int c = 0; c < C::kChunks; ++c) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) o[c][i] = 0.f;
  }
  float max[kColumns], sum[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) max[c] = -kInfinity, sum[c] = 0.f;

  if (work.tile_begin < work.tile_end) mbarrier_wait(q_barrier<C>(ring.smem), 0);
  for (int tile = work.tile_begin + warpgroup; tile < work.tile_end; tile += 2) {
    float s[kBlocks][kValues];
    ring.wait_full();
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int c = 0; c < C::kChunks; ++c) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint64_t keys = operand_descriptor(ring.slot() + c * C::kKvChunkBytes + b * 8192 + k * 32);
          const uint64_t q = operand_descriptor(ring.smem + c * C::kQChunkBytes + k * 32);
          wgmma_smem<C::kBf16, false>(s[b], keys, q, c + k);
        }
      }
    }
    wgmma_commit();
    wgmma_wait();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) pin_registers(s[b]);
    ring.release();

#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) s[b][i] *= scale_log2;
    }
    if (needs_mask<C>(params, work, tile)) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int2 range = ranges[c / 2 * 8 + lane % 4 * 2 + c % 2];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = tile * C::kTileKv + b * 64 + warp * 16 + half * 8 + lane / 4;
            if (key < range.x || key > range.y) s[b][c / 2 * 4 + half * 2 + c % 2] = -kInfinity;
          }
        }
      }
    }
    float tile_max[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      tile_max[c] = max[c];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int i = c / 2 * 4 + c % 2;
        tile_max[c] = fmaxf(tile_max[c], fmaxf(s[b][i], s[b][i + 2]));
      }
    }
    reduce_lanes(tile_max, maximum);
    reduce_warps(tile_max, scratch, barrier, maximum);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float reference = tile_max[c] == -kInfinity ? 0.f : tile_max[c];  // -inf - -inf would be NaN
      const float correction = exp2_approx(max[c] - reference);
      max[c] = tile_max[c];
      sum[c] *= correction;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = c / 2 * 4 + half * 2 + c % 2;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          s[b][i] = exp2_approx(s[b][i] - reference);
          sum[c] += s[b][i];
        }
#pragma unroll
        for (int m = 0; m < C::kChunks; ++m) o[m][i] *= correction;
      }
    }
    // The barrier inside reduce_warps also means: all warps are done with the P of the tile before.
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      uint32_t p[kValues / 2];
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i) p[i] = pack_16bit<C::kBf16>(s[b][2 * i], s[b][2 * i + 1]);
      if constexpr (C::kTileQ == 8) {
        store_matrix_x2_transposed(p_row + b * kPBlockBytes, p[0], p[1]);
      } else {
#pragma unroll
        for (int i = 0; i < kValues / 2; i += 4) {
          store_matrix_x4_transposed(p_row + b * kPBlockBytes + i / 4 * 2048, p[i], p[i + 1], p[i + 2], p[i + 3]);
        }
      }
    }

    ring.wait_full();
    if (has_dead_keys<C>(work, tile)) {
      clean_v<C>(work, tile, smem + (ring.slot() - ring.smem), threadIdx.x % kWarpgroup, kWarpgroup);
    }
    fence_async_proxy();
    named_barrier(barrier, kWarpgroup);
#pragma unroll
    for (int m = 0; m < C::kChunks; ++m) pin_registers(o[m]);
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < C::kChunks; ++m) {
#pragma unroll
      for (int k = 0; k < C::kTileKv / 16; ++k) {
        const uint64_t values = operand_descriptor(ring.slot() + m * C::kKvChunkBytes + k * 2048);
        const uint64_t p = operand_descriptor(p_address + k / 4 * kPBlockBytes + k % 4 * 32);
        wgmma_smem<C::kBf16, true>(o[m], values, p, 1);
      }
    }
    wgmma_commit();
    wgmma_wait();
#pragma unroll
    for (int m = 0; m < C::kChunks; ++m) pin_registers(o[m]);
    ring.release();
  }

  const auto add = [](float a, float b) { return a + b; };
  reduce_lanes(sum, add);
  named_barrier(barrier, kWarpgroup);  // the last tile's maxima have been read
  reduce_warps(sum, scratch, barrier, add);
  named_barrier(1, C::kConsumerThreads);  // the other warpgroup is done with the ring: it becomes output
  SoftmaxStats* stats = reinterpret_cast<SoftmaxStats*>(smem + C::kStatsOffset) + warpgroup * C::kTileQ;
  float* output = reinterpret_cast<float*>(smem + C::kSlotsOffset) + warpgroup * C::kTileQ * C::kOutputStride;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int row = c / 2 * 8 + lane % 4 * 2 + c % 2;
    if (warp == 0 && lane < 4) stats[row] = SoftmaxStats{max[c], sum[c]};
#pragma unroll
    for (int m = 0; m < C::kChunks; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        output[row * C::kOutputStride + m * 64 + warp * 16 + half * 8 + lane / 4] = o[m][c / 2 * 4 + half * 2 + c % 2];
      }
    }
  }
}

}  // namespace fmha::sm90
