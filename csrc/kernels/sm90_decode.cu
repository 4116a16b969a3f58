// Paged-KV GQA decode for sm_90a. One kernel a compilation; tools/build_cubins.py passes the macros.
#include "sm90_decode_keeps.cuh"
#include "sm90_decode_swaps.cuh"

namespace fmha::sm90 {

using Kernel = Config<FMHA_BF16, FMHA_HEAD_DIM, FMHA_TILE_Q, FMHA_TILE_KV, FMHA_SLOTS>;
static_assert(Kernel::kSmemBytes == FMHA_SMEM_BYTES && Kernel::kThreads == FMHA_THREADS,
              "the manifest row disagrees with the kernel");

extern __shared__ __align__(1024) unsigned char dynamic_smem[];

__device__ __forceinline__ void decode(KernelParams const& params) {
  using C = Kernel;
  unsigned char* smem = dynamic_smem;
  const uint32_t smem_base = smem_address(smem);
  if (threadIdx.x == 0) {
    if (smem_base % 1024 != 0) __trap();  // the swizzle pattern counts from 1024-byte boundaries
    init_barriers<C>(smem_base);
    prefetch_tensor_map(&params.tmaQ_);
    prefetch_tensor_map(&params.tmaK_);
    prefetch_tensor_map(&params.tmaV_);
  }
  __syncthreads();
  wait_for_prerequisite_grids();
  const Work work = find_work<C>(params);
  if (work.tokens == 0) return;  // ragged batch: the same for all CTAs of a split

  if (threadIdx.x >= C::kConsumerThreads) {
    if constexpr (C::kMovesRegisters) release_registers<40>();
    if (threadIdx.x < C::kConsumerThreads + 32 && work.tile_begin < work.tile_end) produce<C>(params, work, smem_base);
    return;
  }
  if constexpr (C::kMovesRegisters) acquire_registers<232>();
  const float scale_log2 =
      params.ptrScaleSoftmaxLog2 != nullptr ? __ldcg(params.ptrScaleSoftmaxLog2) : params.mScaleSoftmaxLog2;
  const float output_scale = params.ptrOutputScale != nullptr ? __ldcg(params.ptrOutputScale) : params.mOutputScale;
  if (threadIdx.x < C::kTileQ) {
    const int row = threadIdx.x;
    const int group = params.mNumHeadsQPerKv;
    float sink = -kInfinity;
    if (params.ptrAttentionSinks != nullptr) {
      sink = __ldcg(params.ptrAttentionSinks + work.head_kv * group + row % group) * kLog2E;
    }
    reinterpret_cast<float*>(smem + C::kSinksOffset)[row] = sink;
    if constexpr (C::kSwaps) {
      reinterpret_cast<int2*>(smem + C::kRangesOffset)[row] = key_range(params, work, row);
    }
  }
  named_barrier(1, C::kConsumerThreads);
  if constexpr (C::kSwaps) {
    consume_swaps<C>(params, work, smem, scale_log2);
  } else {
    consume_keeps<C>(params, work, smem, scale_log2);
  }
  named_barrier(1, C::kConsumerThreads);
  launch_dependent_grids();
  write_output<C>(params, work, smem, output_scale);
}

}  // namespace fmha::sm90

extern "C" __global__ void __launch_bounds__(FMHA_THREADS, FMHA_CTAS_PER_SM)
    FMHA_SYMBOL(__grid_constant__ const fmha::KernelParams params) {
  fmha::sm90::decode(params);
}
