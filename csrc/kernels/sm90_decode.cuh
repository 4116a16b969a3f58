// What both operand orders of the sm_90a decode kernel share: the work of a CTA, its shared memory, the producer warp,
// the output with the reduction over split KV.
//
// A CTA attends the queries of one KV head (heads of the group times a few tokens, packed as rows of one tile) to a run
// of KV tiles. The last warp issues TMA loads, K tile then V tile, into a ring of slots; consumer warpgroups multiply.
#pragma once

#include "sm90_ptx.cuh"

namespace fmha::sm90 {

constexpr int kWarpgroup = 128;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_huge_valf();

// A slot of the ring holds a K or V tile as head_dim / 64 chunks of [kTileKv][64] values, 128-byte swizzled.
template <bool kIsBf16, int kHeadDimension, int kRows, int kKeys, int kSlotCount>
struct Config {
  static constexpr bool kBf16 = kIsBf16;
  static constexpr bool kSwaps = kRows < 64;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kTileQ = kRows;
  static constexpr int kTileKv = kKeys;
  static constexpr int kSlots = kSlotCount;
  static constexpr int kChunks = kHeadDim / 64;
  // Kept operands: one warpgroup per 64 rows. Swapped: two warpgroups take turns at the tiles, each with a softmax of
  // its own, so the CTA ends with two partial results.
  static constexpr int kConsumers = kSwaps ? 2 : kTileQ / 64;
  static constexpr int kParts = kSwaps ? 2 : 1;
  static constexpr int kConsumersPerSlot = kSwaps ? 1 : kConsumers;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  // Two kept warpgroups need more registers than an even share: the producer gets a whole warpgroup to give some away.
  static constexpr bool kMovesRegisters = !kSwaps && kConsumers > 1;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? kWarpgroup : 32);

  static constexpr int kQChunkBytes = kTileQ * 128;
  static constexpr int kKvChunkBytes = kTileKv * 128;
  static constexpr int kSlotBytes = kChunks * kKvChunkBytes;
  static constexpr int kPBytes = kSwaps ? kTileQ * kTileKv * 2 : 0;  // of one warpgroup

  static constexpr int kSlotsOffset = kChunks * kQChunkBytes;
  static constexpr int kPOffset = kSlotsOffset + kSlots * kSlotBytes;
  static constexpr int kColumnOffset = kPOffset + kConsumers * kPBytes;  // float [kConsumers][4 warps][kTileQ]
  static constexpr int kRangesOffset = kColumnOffset + (kSwaps ? kConsumers * 4 * kTileQ * 4 : 0);  // int2 [kTileQ]
  static constexpr int kStatsOffset = kRangesOffset + (kSwaps ? kTileQ * 8 : 0);  // SoftmaxStats [kParts][kTileQ]
  static constexpr int kSinksOffset = kStatsOffset + kParts * kTileQ * 8;         // float [kTileQ], log2 domain
  static constexpr int kBarriersOffset = kSinksOffset + kTileQ * 4;               // full[kSlots], empty[kSlots], q
  static constexpr int kTicketOffset = kBarriersOffset + (2 * kSlots + 1) * 8;
  static constexpr int kSmemBytes = (kTicketOffset + 4 + 127) / 128 * 128;

  // Once the ring is drained it holds the unnormalised output, float [kParts][kTileQ][kOutputStride]; the padding
  // spreads the rows over the banks.
  static constexpr int kOutputStride = kHeadDim + 4;
  static_assert(kParts * kTileQ * kOutputStride * 4 <= kSlots * kSlotBytes, "output does not fit in the ring");
  static_assert(kPOffset % 1024 == 0 && kPBytes % 1024 == 0);
  static_assert(kSlots >= 4 && (!kSwaps || kSlots % 2 == 0));
};

// The share of this CTA. Positions count from the start of the request's KV.
struct Work {
  int batch, head_kv, cta_q, cta_kv;
  int first_token;           // row of q and o of the tile's first token
  int tokens;                // of the tile; 0 when the request has none left
  int position;              // of the first token; negative when it sees no key
  int key_begin, key_end;    // keys that any row of the tile sees
  int tile_begin, tile_end;  // KV tiles of this CTA
};

// The prerequisite grid may have written any of this: reads go to the L2, past lines that an earlier CTA left in the
// L1.
template <class C>
__device__ __forceinline__ Work find_work(KernelParams const& params) {
  Work work;
  work.batch = blockIdx.z;
  work.head_kv = blockIdx.y;
  const int splits = params.mMaxNumCtasKv;
  work.cta_q = blockIdx.x / splits;
  work.cta_kv = blockIdx.x % splits;

  int q_begin = work.batch * params.mMaxSeqLenQ;
  int seq_len_q = params.mMaxSeqLenQ;
  if (params.ptrCumSeqLensQ != nullptr) {
    q_begin = __ldcg(params.ptrCumSeqLensQ + work.batch);
    seq_len_q = __ldcg(params.ptrCumSeqLensQ + work.batch + 1) - q_begin;
  }
  const int seq_len_kv = __ldcg(params.ptrSeqLensKv + work.batch);
  const int skipped = work.cta_q * params.mNumTokensPerCtaQ;
  work.first_token = q_begin + skipped;
  work.tokens = max(min(params.mNumTokensPerCtaQ, seq_len_q - skipped), 0);
  work.position = seq_len_kv - seq_len_q + skipped;
  work.key_end = max(work.position + work.tokens, 0);
  const int window = params.mAttentionWindowSize;
  work.key_begin = work.position >= window ? work.position - window + 1 : 0;

  const int first = work.key_begin / C::kTileKv;
  const int tiles = work.key_end > 0 ? (work.key_end - 1) / C::kTileKv + 1 - first : 0;
  work.tile_begin = first + static_cast<int>(static_cast<int64_t>(tiles) * work.cta_kv / splits);
  work.tile_end = first + static_cast<int>(static_cast<int64_t>(tiles) * (work.cta_kv + 1) / splits);
  return work;
}

// First and last key that row `row` sees; first > last when none.
__device__ __forceinline__ int2 key_range(KernelParams const& params, Work const& work, int row) {
  const int position = work.position + row / params.mNumHeadsQPerKv;
  const int window = params.mAttentionWindowSize;
  return make_int2(position >= window ? position - window + 1 : 0, position);
}

// --- ring
// ----------------------------------------------------------------------------------------------------------------

// A place in the ring of K and V tiles. A wait on an mbarrier tells one phase from the next only, so whoever waits for
// a slot must wait for each of its phases: two warpgroups that take turns at the tiles own half of the slots each.
template <class C>
struct Ring {
  static constexpr int kOwners = C::kSwaps ? 2 : 1;
  static constexpr int kSlotsEach = C::kSlots / kOwners;
  uint32_t smem;
  int owner;
  int index = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ uint32_t slot() const {
    return smem + C::kSlotsOffset + (owner * kSlotsEach + index) * C::kSlotBytes;
  }
  __device__ __forceinline__ uint32_t full() const {
    return smem + C::kBarriersOffset + (owner * kSlotsEach + index) * 8;
  }
  __device__ __forceinline__ uint32_t empty() const { return full() + C::kSlots * 8; }
  __device__ __forceinline__ void wait_full() const { mbarrier_wait(full(), phase); }
  __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(), phase ^ 1); }
  __device__ __forceinline__ void advance() {
    if (++index == kSlotsEach) index = 0, phase ^= 1;
  }
  // Gives the slot back and moves on. One arrival a warp: each waits for its own part of the multiplication only.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty());
    advance();
  }
};

template <class C>
__device__ __forceinline__ uint32_t q_barrier(uint32_t smem) {
  return smem + C::kBarriersOffset + 2 * C::kSlots * 8;
}

template <class C>
__device__ __forceinline__ void init_barriers(uint32_t smem) {
  for (int i = 0; i < C::kSlots; ++i) {
    mbarrier_init(smem + C::kBarriersOffset + i * 8, 1);
    mbarrier_init(smem + C::kBarriersOffset + (C::kSlots + i) * 8, 4 * C::kConsumersPerSlot);
  }
  mbarrier_init(q_barrier<C>(smem), 1);
  mbarrier_init_fence();
}

// Page ids of a request, 32 a register (one a lane) with the next 32 on their way. Ids outside [first, last] stay
// unread.
struct PageIds {
  int const* ids;
  int first, last, group;
  int current, next;
  __device__ __forceinline__ int fetch(int g) const {
    const int page = 32 * g + static_cast<int>(threadIdx.x) % 32;
    return page >= first && page <= last ? __ldcg(ids + page) : 0;
  }
  __device__ __forceinline__ PageIds(int const* ids_, int first_, int last_, int page)
      : ids(ids_), first(first_), last(last_), group(page / 32) {
    current = fetch(group);
    next = fetch(group + 1);
  }
  // Pages of one tile never straddle a group of 32.
  __device__ __forceinline__ void advance(int page) {
    if (page / 32 == group) return;
    ++group;
    current = next;
    next = fetch(group + 1);
  }
  __device__ __forceinline__ int get(int page) const { return __shfl_sync(0xffffffff, current, page & 31); }
};

// The producer warp. Only pages with a key of [key_begin, key_end) in the CTA's tiles are loaded; what else a slot
// holds is left as it was.
template <class C>
__device__ __forceinline__ void produce(KernelParams const& params, Work const& work, uint32_t smem) {
  if (elect_one()) {
    const int tokens = params.mNumTokensPerCtaQ;
    mbarrier_arrive_expect(q_barrier<C>(smem), C::kChunks * params.mNumHeadsQPerKv * tokens * 128);
#pragma unroll
    for (int c = 0; c < C::kChunks; ++c) {
      tma_load_4d(smem + c * C::kQChunkBytes, &params.tmaQ_, q_barrier<C>(smem), 64 * c, 0, work.head_kv,
                  work.first_token);
    }
  }
  const int page_log2 = params.mNumTokensPerPageLog2;
  const int box_keys = min(1 << page_log2, C::kTileKv);
  const int boxes = C::kTileKv / box_keys;
  const int64_t tile_end_key = static_cast<int64_t>(work.tile_end) * C::kTileKv;
  const int first_page = max(work.key_begin, work.tile_begin * C::kTileKv) >> page_log2;
  const int last_page = static_cast<int>(min(tile_end_key, static_cast<int64_t>(work.key_end)) - 1) >> page_log2;

  const bool shared = params.mUsesSharedPagedKvIdx;
  const int64_t table_row = shared ? work.batch : 2 * static_cast<int64_t>(work.batch);
  int const* ids_k = params.ptrPageIdxKv + table_row * params.mMaxNumPagesPerSeqKv;
  int const* ids_v = shared ? ids_k : ids_k + params.mMaxNumPagesPerSeqKv;
  const int start_page = (work.tile_begin * C::kTileKv) >> page_log2;
  PageIds pages_k(ids_k, first_page, last_page, start_page);
  PageIds pages_v(ids_v, first_page, last_page, start_page);

  Ring<C> ring{smem, 0};
  for (int tile = work.tile_begin; tile < work.tile_end; ++tile) {
    const int key = tile * C::kTileKv;
    const int page = key >> page_log2;
    const int row = key & ((1 << page_log2) - 1);
    const int begin = max(first_page - page, 0);
    const int end = min(last_page - page + 1, boxes);
    pages_k.advance(page);
    pages_v.advance(page);
    Ring<C> turn = ring;
    turn.owner = (tile - work.tile_begin) % Ring<C>::kOwners;
#pragma unroll
    for (int is_v = 0; is_v < 2; ++is_v) {
      turn.wait_empty();
      if (elect_one()) mbarrier_arrive_expect(turn.full(), (end - begin) * box_keys * C::kHeadDim * 2);
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        const int id = is_v ? pages_v.get(page + i) : pages_k.get(page + i);
        if (elect_one()) {
          const uint32_t box = turn.slot() + i * box_keys * 128;
          TensorMap const* map = is_v ? &params.tmaV_ : &params.tmaK_;
#pragma unroll
          for (int c = 0; c < C::kChunks; ++c) {
            tma_load_4d(box + c * C::kKvChunkBytes, map, turn.full(), 64 * c, row, work.head_kv, id);
          }
        }
      }
      turn.advance();
    }
    if (turn.owner == Ring<C>::kOwners - 1) ring = turn;
  }
}

// Zeroes the rows of a V tile that hold no key of [key_begin, key_end): their weight is 0, but 0 * NaN is NaN. The
// caller makes the writes visible to wgmma (fence_async_proxy, then a barrier of the threads).
template <class C>
__device__ __forceinline__ void clean_v(Work const& work, int tile, unsigned char* slot, int thread, int threads) {
  const int key = tile * C::kTileKv;
  const int begin = max(work.key_begin - key, 0);
  const int end = min(work.key_end - key, C::kTileKv);
  const int dead = C::kTileKv - (end - begin);
  for (int i = thread; i < dead * C::kChunks * 8; i += threads) {
    const int r = i / (C::kChunks * 8);
    const int row = r < begin ? r : r - begin + end;
    const int column = i % (C::kChunks * 8);
    unsigned char* piece = slot + column / 8 * C::kKvChunkBytes + row * 128 + column % 8 * 16;
    *reinterpret_cast<uint4*>(piece) = make_uint4(0, 0, 0, 0);
  }
}

template <class C>
__device__ __forceinline__ bool has_dead_keys(Work const& work, int tile) {
  return tile * C::kTileKv < work.key_begin || tile * C::kTileKv > work.key_end - C::kTileKv;
}

// Whether some row does not see some key of the tile.
template <class C>
__device__ __forceinline__ bool needs_mask(KernelParams const& params, Work const& work, int tile) {
  const int last = work.position + work.tokens - 1;
  const int last_begin = last >= params.mAttentionWindowSize ? last - params.mAttentionWindowSize + 1 : 0;
  return tile * C::kTileKv < last_begin || tile * C::kTileKv > work.position + 1 - C::kTileKv;
}

// --- output
// --------------------------------------------------------------------------------------------------------------

// A row of the result, spread over a warp: lane i holds head_dim / 32 consecutive values. Sum 0: no key was seen.
template <class C>
struct RowResult {
  static constexpr int kValues = C::kHeadDim / 32;
  float o[kValues];
  float max, sum;
};

template <int kValues>
__device__ __forceinline__ void load_values(float (&o)[kValues], float const* pointer) {
#pragma unroll
  for (int i = 0; i < kValues; i += 2) {
    const float2 v = *reinterpret_cast<float2 const*>(pointer + i);
    o[i] = v.x, o[i + 1] = v.y;
  }
}

// Merges partial softmaxes of one row. `stats(n)` and `values(n, o)` read part n; values of a part with sum 0 are never
// read. kBatch parts are read at a time: from afar this is bound by latency.
template <class C, int kBatch, class Stats, class Values>
__device__ __forceinline__ RowResult<C> merge(int parts, Stats stats, Values values) {
  constexpr int kValues = RowResult<C>::kValues;
  const int lane = threadIdx.x % 32;
  RowResult<C> row;
  row.max = -kInfinity;
#pragma unroll 1
  for (int n = lane; n < parts; n += 32) {
    const SoftmaxStats part = stats(n);
    if (part.sum != 0.f) row.max = fmaxf(row.max, part.max);
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) row.max = fmaxf(row.max, __shfl_xor_sync(0xffffffff, row.max, i));
  const float reference = row.max == -kInfinity ? 0.f : row.max;
  row.sum = 0.f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) row.o[i] = 0.f;
  for (int start = 0; start < parts; start += 32) {
    float weight = 0.f;
    bool live = false;
    if (start + lane < parts) {
      const SoftmaxStats part = stats(start + lane);
      live = part.sum != 0.f;
      if (live) {
        weight = exp2_approx(part.max - reference);
        row.sum += part.sum * weight;
      }
    }
    const unsigned lives = __ballot_sync(0xffffffff, live);
    for (int n = 0; n < 32 && lives >> n != 0; n += kBatch) {
      float v[kBatch][kValues];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) v[u][i] = 0.f;
        if (lives >> (n + u) & 1) values(start + n + u, v[u]);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const float w = __shfl_sync(0xffffffff, weight, n + u);
#pragma unroll
        for (int i = 0; i < kValues; ++i) row.o[i] += w * v[u][i];
      }
    }
  }
#pragma unroll
  for (int i = 16; i > 0; i /= 2) row.sum += __shfl_xor_sync(0xffffffff, row.sum, i);
  return row;
}

template <class C>
__device__ __forceinline__ void store_row(KernelParams const& params, Work const& work, int row,
                                          RowResult<C> const& result, float output_scale, float sink) {
  constexpr int kValues = RowResult<C>::kValues;
  const int lane = threadIdx.x % 32;
  const int group = params.mNumHeadsQPerKv;
  const int64_t token = work.first_token + row / group;
  const int64_t index = token * params.mNumHeadsQ + work.head_kv * group + row % group;
  float scale = 0.f;
  float lse = -kInfinity;
  if (result.sum != 0.f) {
    const float max = fmaxf(result.max, sink);
    const float weight = exp2_approx(result.max - max);
    const float sum = result.sum * weight + exp2_approx(sink - max);
    scale = output_scale * weight / sum;
    lse = (max + log2f(sum)) * kLn2;
  }
  uint32_t packed[kValues / 2];
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) {
    packed[i] = pack_16bit<C::kBf16>(result.o[2 * i] * scale, result.o[2 * i + 1] * scale);
  }
  uint32_t* o = static_cast<uint32_t*>(params.ptrO) + index * (C::kHeadDim / 2) + lane * (kValues / 2);
  if constexpr (kValues == 2) {
    *o = packed[0];
  } else if constexpr (kValues == 4) {
    *reinterpret_cast<uint2*>(o) = make_uint2(packed[0], packed[1]);
  } else {
    *reinterpret_cast<uint4*>(o) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
  if (params.ptrLse != nullptr && lane == 0) params.ptrLse[index] = lse;
}

// Runs in the consumer warps after all of them wrote their parts (output and statistics) to shared memory.
template <class C>
__device__ __forceinline__ void write_output(KernelParams const& params, Work const& work, unsigned char* smem,
                                             float output_scale) {
  constexpr int kValues = RowResult<C>::kValues;
  constexpr int kWarps = C::kConsumerThreads / 32;
  constexpr int kBatch = kValues == 2 ? 8 : 4;
  const int warp = threadIdx.x / 32;
  const int column = threadIdx.x % 32 * kValues;
  const int rows = work.tokens * params.mNumHeadsQPerKv;
  const int splits = params.mMaxNumCtasKv;
  float const* sinks = reinterpret_cast<float const*>(smem + C::kSinksOffset);
  float const* output = reinterpret_cast<float const*>(smem + C::kSlotsOffset);
  SoftmaxStats const* stats = reinterpret_cast<SoftmaxStats const*>(smem + C::kStatsOffset);
  auto merge_cta = [&](int row) {
    return merge<C, C::kParts>(
        C::kParts, [&](int n) { return stats[n * C::kTileQ + row]; },
        [&](int n, float (&o)[kValues]) {
          load_values(o, output + (n * C::kTileQ + row) * C::kOutputStride + column);
        });
  };

  if (splits == 1) {
    for (int row = warp; row < rows; row += kWarps) {
      store_row<C>(params, work, row, merge_cta(row), output_scale, sinks[row]);
    }
    return;
  }

  if (cluster_size() > 1) {
    cluster_sync();
    const uint32_t stats_address = smem_address(stats);
    const uint32_t output_address = smem_address(output);
    for (int row = warp * splits + work.cta_kv; row < rows; row += kWarps * splits) {
      const RowResult<C> result = merge<C, kBatch>(
          splits * C::kParts,
          [&](int n) {
            const int part = n % C::kParts * C::kTileQ + row;
            const float2 v = load_peer_float2(peer_address(stats_address + part * 8, n / C::kParts));
            return SoftmaxStats{v.x, v.y};
          },
          [&](int n, float (&o)[kValues]) {
            const int part = n % C::kParts * C::kTileQ + row;
            const uint32_t address =
                peer_address(output_address + (part * C::kOutputStride + column) * 4, n / C::kParts);
#pragma unroll
            for (int i = 0; i < kValues; i += 2) {
              const float2 v = load_peer_float2(address + i * 4);
              o[i] = v.x, o[i + 1] = v.y;
            }
          });
      store_row<C>(params, work, row, result, output_scale, sinks[row]);
    }
    cluster_sync();  // shared memory of a CTA must outlive its readers
    return;
  }

  // Global memory: the CTA that arrives last merges the parts of all.
  const int64_t tile = (static_cast<int64_t>(work.batch) * gridDim.y + work.head_kv) * params.mMaxNumCtasQ + work.cta_q;
  const int64_t first_row = tile * splits * C::kTileQ;
  SoftmaxStats* partial_stats = params.ptrPartialStats + first_row;
  float* partial_o = static_cast<float*>(params.ptrPartialO) + first_row * C::kHeadDim + column;
  for (int row = warp; row < rows; row += kWarps) {
    const RowResult<C> result = merge_cta(row);
    const int64_t part = work.cta_kv * C::kTileQ + row;
    if (column == 0) partial_stats[part] = SoftmaxStats{result.max, result.sum};
    if (result.sum != 0.f) {
      float2* o = reinterpret_cast<float2*>(partial_o + part * C::kHeadDim);
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i) o[i] = make_float2(result.o[2 * i], result.o[2 * i + 1]);
    }
  }
  __threadfence();
  named_barrier(1, C::kConsumerThreads);
  int* ticket = reinterpret_cast<int*>(smem + C::kTicketOffset);
  if (threadIdx.x == 0) {
    *ticket = atomicAdd(params.ptrMultiCtasKvCounter + tile, 1);
    __threadfence();
  }
  named_barrier(1, C::kConsumerThreads);
  if (*ticket != splits - 1) return;
  for (int row = warp; row < rows; row += kWarps) {
    const RowResult<C> result = merge<C, kBatch>(
        splits,
        [&](int n) {
          const float2 v = __ldcg(reinterpret_cast<float2 const*>(partial_stats + n * C::kTileQ + row));
          return SoftmaxStats{v.x, v.y};
        },
        [&](int n, float (&o)[kValues]) {
          float2 const* part =
              reinterpret_cast<float2 const*>(partial_o + (static_cast<int64_t>(n) * C::kTileQ + row) * C::kHeadDim);
#pragma unroll
          for (int i = 0; i < kValues / 2; ++i) {
            const float2 v = __ldcg(part + i);
            o[2 * i] = v.x, o[2 * i + 1] = v.y;
          }
        });
    store_row<C>(params, work, row, result, output_scale, sinks[row]);
  }
  if (threadIdx.x == 0) params.ptrMultiCtasKvCounter[tile] = 0;
}

}  // namespace fmha::sm90
