// Kept operand order (64 or 128 packed rows): S = Q K^T with 64 rows a warpgroup, O = P V with P from registers.
#pragma once

#include "sm90_decode.cuh"
#include "sm90_wgmma.cuh"

namespace fmha::sm90 {

template <class C>
__device__ __forceinline__ void consume_keeps(KernelParams const& params, Work const& work, unsigned char* smem,
                                              float scale_log2) {
  Ring<C> ring{smem_address(smem), 0};
  const int lane = threadIdx.x % 32;
  const int warpgroup_row = threadIdx.x / kWarpgroup * 64;
  const int row = threadIdx.x / 32 * 16 + lane / 4;  // and row + 8
  const int column = lane % 4 * 2;
  const int2 ranges[2] = {key_range(params, work, row), key_range(params, work, row + 8)};

  float o[C::kHeadDim / 2];
#pragma unroll
  for (int i = 0; i < C::kHeadDim / 2; ++i) o[i] = 0.f;
  float max[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0.f, 0.f};

  if (work.tile_begin < work.tile_end) mbarrier_wait(q_barrier<C>(ring.smem), 0);
  for (int tile = work.tile_begin; tile < work.tile_end; ++tile) {
    float s[C::kTileKv / 2];
    ring.wait_full();
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < C::kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t q = operand_descriptor(ring.smem + c * C::kQChunkBytes + warpgroup_row * 128 + k * 32);
        const uint64_t keys = operand_descriptor(ring.slot() + c * C::kKvChunkBytes + k * 32);
        wgmma_smem<C::kBf16, false>(s, q, keys, c + k);
      }
    }
    wgmma_commit();
    wgmma_wait();
    pin_registers(s);
    ring.release();

#pragma unroll
    for (int i = 0; i < C::kTileKv / 2; ++i) s[i] *= scale_log2;
    if (needs_mask<C>(params, work, tile)) {
#pragma unroll
      for (int i = 0; i < C::kTileKv / 2; ++i) {
        const int key = tile * C::kTileKv + i / 4 * 8 + column + i % 2;
        const int2 range = ranges[i / 2 % 2];
        if (key < range.x || key > range.y) s[i] = -kInfinity;
      }
    }
    uint32_t p[C::kTileKv / 4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = max[half];
#pragma unroll
      for (int i = 2 * half; i < C::kTileKv / 2; i += 4) tile_max = fmaxf(tile_max, fmaxf(s[i], s[i + 1]));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, 2));
      const float reference = tile_max == -kInfinity ? 0.f : tile_max;  // -inf - -inf would be NaN
      const float correction = exp2_approx(max[half] - reference);
      max[half] = tile_max;
      sum[half] *= correction;
#pragma unroll
      for (int i = 2 * half; i < C::kTileKv / 2; i += 4) {
        s[i] = exp2_approx(s[i] - reference);
        s[i + 1] = exp2_approx(s[i + 1] - reference);
        sum[half] += s[i] + s[i + 1];
        // The accumulator's columns 8 j .. 8 j + 7 are half of the next A operand's 16.
        p[i / 2] = pack_16bit<C::kBf16>(s[i], s[i + 1]);
      }
#pragma unroll
      for (int i = 2 * half; i < C::kHeadDim / 2; i += 4) o[i] *= correction, o[i + 1] *= correction;
    }

    ring.wait_full();
    if (has_dead_keys<C>(work, tile)) {
      clean_v<C>(work, tile, smem + (ring.slot() - ring.smem), threadIdx.x, C::kConsumerThreads);
      fence_async_proxy();
      named_barrier(1, C::kConsumerThreads);
    }
    pin_registers(o);
    pin_registers(p);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kTileKv / 16; ++k) {
      wgmma_registers<C::kBf16>(o, p + 4 * k, operand_descriptor(ring.slot() + k * 2048, C::kKvChunkBytes));
    }
    wgmma_commit();
    wgmma_wait();
    pin_registers(o);
    ring.release();
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 1);
    sum[half] += __shfl_xor_sync(0xffffffff, sum[half], 2);
  }
  // Both warpgroups read the same slots: the ring may become output only when neither multiplies any more.
  named_barrier(1, C::kConsumerThreads);
  SoftmaxStats* stats = reinterpret_cast<SoftmaxStats*>(smem + C::kStatsOffset);
  float* output = reinterpret_cast<float*>(smem + C::kSlotsOffset);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (column == 0) stats[row + 8 * half] = SoftmaxStats{max[half], sum[half]};
    float* o_row = output + (row + 8 * half) * C::kOutputStride + column;
#pragma unroll
    for (int i = 2 * half; i < C::kHeadDim / 2; i += 4) {
      *reinterpret_cast<float2*>(o_row + i / 4 * 8) = make_float2(o[i], o[i + 1]);
    }
  }
}

}  // namespace fmha::sm90
