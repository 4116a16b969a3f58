#include "params.h"

#include <algorithm>
#include <cstring>

#include "trtllm_gen_tensor_maps.h"

namespace fmha {
namespace {

template <class T>
T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

int32_t narrow(int64_t value) { return static_cast<int32_t>(value); }

int ceil_log2(int64_t value) {
  int log2 = 0;
  while (int64_t{1} << log2 < value) ++log2;
  return log2;
}

// Fields that only NVIDIA's kernels have a use for.
void fill_trtllm_gen(const Problem& p, const Row& row, const Buffers& b, KernelParams* params) {
  params->ptrSfO = pointer<void>(b.o_sf);
  params->ptrCumSeqLensKv = pointer<int32_t const>(b.cum_seq_lens_kv);
  params->ptrSageAttnSfsQ = pointer<float const>(b.sage_sf_q);
  params->ptrSageAttnSfsK = pointer<float const>(b.sage_sf_k);
  params->ptrSageAttnSfsP = pointer<float const>(b.sage_sf_p);
  params->ptrSageAttnSfsV = pointer<float const>(b.sage_sf_v);
  params->ptrSoftmaxStats = pointer<SoftmaxStats>(b.softmax_stats);
  params->ptrSparseMlaTopKLens = pointer<int32_t const>(b.sparse_top_k_lens);
  params->mLogNumEltsPerSageAttnBlkQ = ceil_log2(row.sage_q);
  params->mLogNumEltsPerSageAttnBlkK = ceil_log2(row.sage_k);
  params->mLogNumEltsPerSageAttnBlkP = ceil_log2(row.sage_p);
  params->mLogNumEltsPerSageAttnBlkV = ceil_log2(row.sage_v);
  params->mNumPagesInMemPool = narrow(trtllm_gen::num_pages_in_pool(p, b));
  params->mReshapeFactorKv = narrow(trtllm_gen::kv_reshape_factor(p, row));
  params->mSkipSoftmaxThresholdScaleFactor = b.skip_softmax_factor;
  params->mSparseAttnTopK = narrow(p.sparse_top_k);
  params->mStartTokenIdxSfO = narrow(b.start_token_sf_o);
  params->mSumOfSeqLensKv = narrow(p.sum_seq_lens_kv);
}

}  // namespace

FastModDiv fast_mod_div(int32_t divisor) {
  const int shift = ceil_log2(divisor) - 1;
  const uint64_t d = static_cast<uint64_t>(divisor);
  return {divisor, static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + d - 1) / d), 0, shift};
}

void fill_params(const Problem& p, const Row& row, const Shape& shape, const Buffers& b, KernelParams* params) {
  std::memset(static_cast<void*>(params), 0, sizeof *params);
  const int64_t group = p.num_heads_q / p.num_heads_kv;

  params->ptrO = pointer<void>(b.o);
  params->ptrAttentionSinks = pointer<float const>(b.sinks);
  params->ptrCumSeqLensQ = pointer<int32_t const>(b.cum_seq_lens_q);
  params->ptrMultiCtasKvCounter = pointer<int32_t>(b.counters);
  params->ptrOutputScale = pointer<float const>(b.output_scale_ptr);
  params->ptrPageIdxKv = pointer<int32_t const>(b.block_tables);
  if (shape.partial_stats_bytes != 0) {
    params->ptrPartialStats = pointer<SoftmaxStats>(b.scratch);
    params->ptrPartialO = pointer<void>(b.scratch + static_cast<uint64_t>(shape.partial_stats_bytes));
  }
  params->ptrScaleSoftmaxLog2 = pointer<float const>(b.scale_softmax_log2_ptr);
  params->ptrSeqLensKv = pointer<int32_t const>(b.seq_lens_kv);
  params->mAttentionWindowSize =
      p.window_left == -1 ? INT32_MAX : narrow(std::min<int64_t>(p.window_left, INT32_MAX - 1) + 1);
  params->mBatchSize = narrow(p.batch_size);
  params->mMaxSeqLenQ = narrow(p.max_seq_len_q);
  params->mMaxSeqLenKv = narrow(p.max_seq_len_kv);
  params->mMaxNumCtasQ = shape.num_ctas_q;
  params->mMaxNumCtasKv = shape.num_ctas_kv;
  params->mMaxNumPagesPerSeqKv = narrow(p.max_pages_per_seq);
  params->mNumHeadsKv = narrow(p.num_heads_kv);
  params->mNumHeadsQ = narrow(p.num_heads_q);
  params->mNumHeadsQPerKv = narrow(group);
  params->mNumHeadsQPerKvDivisor = fast_mod_div(narrow(group));
  params->mNumHiddenEltsO = p.num_heads_q * p.head_dim_qk;
  params->mNumTokensPerCtaQ = shape.num_tokens_per_cta_q;
  params->mNumTokensPerPageLog2 = p.layout == QkvLayout::kPagedKv ? ceil_log2(p.page_size) : -1;
  params->mReshapeFactorKv = 1;
  params->mOutputScale = b.output_scale;
  params->mScaleSoftmaxLog2 = b.scale_softmax_log2;
  params->mScaleSfKv = b.scale_sf_kv;
  params->mScaleSfO = b.scale_sf_o;
  params->mSumOfSeqLensQ = narrow(p.sum_seq_lens_q);
  params->mUsesSharedPagedKvIdx = p.uses_shared_paged_kv_idx;

  // Where the families differ.
  if (is_trtllm_gen(row)) {
    fill_trtllm_gen(p, row, b, params);
  } else {
    params->mNumPagesInMemPool = narrow(p.num_pages_k);
    params->ptrLse = pointer<float>(b.lse);
  }
}

}  // namespace fmha
