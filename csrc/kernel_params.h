// KernelParams: the one argument, by value, of every kernel of every family. Shared by host and device code.
//
// Layout of trtllm-gen artifact 158f6fa11e (FlashInfer 0.6.13): every field up to mUsesSharedPagedKvIdx has NVIDIA's
// name, offset and type. The tail after it is padding in NVIDIA's struct and zero for trtllm-gen kernels; our own
// families keep there what NVIDIA's struct has no field for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fmha {

// Same size and alignment as CUtensorMap under CUDA 13 headers; own type so that the ABI does not move with cuda.h
// (CUDA 12 headers align it to 64) and so that device code needs no driver header.
struct alignas(128) TensorMap {
  uint64_t opaque[16];
};

// cuda::fast_mod_div<int32>: division of a non-negative int32 by a constant, as multiply-high and shift.
struct FastModDiv {
  int32_t divisor;
  uint32_t multiplier;
  uint32_t add;
  int32_t shift;
};

// Running maximum (log2 domain, scaled) and sum of exp2 of one row of a partial softmax.
struct alignas(8) SoftmaxStats {
  float max;
  float sum;
};

struct alignas(128) KernelParams {
  TensorMap tmaQ_;
  TensorMap tmaK_;
  TensorMap tmaKSlidingWindowKvPool_;
  TensorMap tmaV_;
  TensorMap tmaO_;
  TensorMap tmaKSf_;
  TensorMap tmaVSf_;
  int32_t logicalGridDimX;
  int32_t logicalGridDimY;
  int32_t logicalGridDimZ;
  void* ptrO;
  void* ptrSfO;
  float const* ptrAttentionSinks;
  int32_t const* ptrCumSeqLensQ;
  int32_t const* ptrCumSeqLensKv;
  uint32_t const* ptrCustomMask;
  int64_t const* ptrCustomMaskOffsets;
  float* ptrDebugO;
  int32_t const* ptrFirstSparseMaskOffsetsKv;
  int32_t* ptrMultiCtasKvCounter;
  float const* ptrOutputScale;
  int32_t const* ptrPageIdxKv;
  void* ptrPartialO;
  SoftmaxStats* ptrPartialStats;
  float const* ptrSageAttnSfsK;
  float const* ptrSageAttnSfsP;
  float const* ptrSageAttnSfsQ;
  float const* ptrSageAttnSfsV;
  float const* ptrScaleSoftmaxLog2;
  float const* ptrScaleSfKv;
  float const* ptrScaleSfO;
  int32_t const* ptrSeqLensKv;
  int32_t* ptrSkipSoftmaxStats;
  SoftmaxStats* ptrSoftmaxStats;
  int32_t const* ptrSparseMlaTopKLens;
  int32_t mAttentionWindowSize;
  int32_t mBatchSize;
  int32_t mChunkedAttentionSizeLog2;
  float mInflateMax;
  int32_t mLogNumEltsPerSageAttnBlkK;
  int32_t mLogNumEltsPerSageAttnBlkP;
  int32_t mLogNumEltsPerSageAttnBlkQ;
  int32_t mLogNumEltsPerSageAttnBlkV;
  int32_t mMaxSeqLenQ;
  int32_t mMaxSeqLenKv;
  int32_t mMaxNumCtasQ;
  int32_t mMaxNumCtasKv;
  int32_t mMaxNumPagesPerSeqKv;
  int32_t mNumHeadsKv;
  int32_t mNumHeadsQ;
  int32_t mNumHeadsQPerKv;
  FastModDiv mNumHeadsQPerKvDivisor;
  int64_t mNumHiddenEltsO;
  int32_t mNumPagesInMemPool;
  int32_t mNumTokensPerCtaQ;
  int32_t mNumTokensPerPageLog2;
  int32_t mReshapeFactorKv;
  float mOutputScale;
  float mScaleSoftmaxLog2;
  float mScaleSfKv;
  float mScaleSfO;
  float mSkipSoftmaxThresholdScaleFactor;
  int32_t mSparseAttnTopK;
  int32_t mStartTokenIdxSfO;
  int32_t mSumOfSeqLensQ;
  int32_t mSumOfSeqLensKv;
  bool mUseBlockSparseAttention;
  bool mUsesSharedPagedKvIdx;
  // --- tail: padding for trtllm-gen, ours below ---
  uint8_t tailPadding[2];
  // float32 [sum_seq_lens_q, num_heads_q], natural logarithm; null when no LSE is wanted.
  float* ptrLse;
  uint64_t tailReserved[2];
};

#define FMHA_ASSERT_OFFSET(field, offset) \
  static_assert(offsetof(KernelParams, field) == (offset), "KernelParams::" #field " moved")
FMHA_ASSERT_OFFSET(tmaQ_, 0);
FMHA_ASSERT_OFFSET(tmaK_, 128);
FMHA_ASSERT_OFFSET(tmaKSlidingWindowKvPool_, 256);
FMHA_ASSERT_OFFSET(tmaV_, 384);
FMHA_ASSERT_OFFSET(tmaO_, 512);
FMHA_ASSERT_OFFSET(tmaKSf_, 640);
FMHA_ASSERT_OFFSET(tmaVSf_, 768);
FMHA_ASSERT_OFFSET(logicalGridDimX, 896);
FMHA_ASSERT_OFFSET(logicalGridDimY, 900);
FMHA_ASSERT_OFFSET(logicalGridDimZ, 904);
FMHA_ASSERT_OFFSET(ptrO, 912);
FMHA_ASSERT_OFFSET(ptrSfO, 920);
FMHA_ASSERT_OFFSET(ptrAttentionSinks, 928);
FMHA_ASSERT_OFFSET(ptrCumSeqLensQ, 936);
FMHA_ASSERT_OFFSET(ptrCumSeqLensKv, 944);
FMHA_ASSERT_OFFSET(ptrCustomMask, 952);
FMHA_ASSERT_OFFSET(ptrCustomMaskOffsets, 960);
FMHA_ASSERT_OFFSET(ptrDebugO, 968);
FMHA_ASSERT_OFFSET(ptrFirstSparseMaskOffsetsKv, 976);
FMHA_ASSERT_OFFSET(ptrMultiCtasKvCounter, 984);
FMHA_ASSERT_OFFSET(ptrOutputScale, 992);
FMHA_ASSERT_OFFSET(ptrPageIdxKv, 1000);
FMHA_ASSERT_OFFSET(ptrPartialO, 1008);
FMHA_ASSERT_OFFSET(ptrPartialStats, 1016);
FMHA_ASSERT_OFFSET(ptrSageAttnSfsK, 1024);
FMHA_ASSERT_OFFSET(ptrSageAttnSfsP, 1032);
FMHA_ASSERT_OFFSET(ptrSageAttnSfsQ, 1040);
FMHA_ASSERT_OFFSET(ptrSageAttnSfsV, 1048);
FMHA_ASSERT_OFFSET(ptrScaleSoftmaxLog2, 1056);
FMHA_ASSERT_OFFSET(ptrScaleSfKv, 1064);
FMHA_ASSERT_OFFSET(ptrScaleSfO, 1072);
FMHA_ASSERT_OFFSET(ptrSeqLensKv, 1080);
FMHA_ASSERT_OFFSET(ptrSkipSoftmaxStats, 1088);
FMHA_ASSERT_OFFSET(ptrSoftmaxStats, 1096);
FMHA_ASSERT_OFFSET(ptrSparseMlaTopKLens, 1104);
FMHA_ASSERT_OFFSET(mAttentionWindowSize, 1112);
FMHA_ASSERT_OFFSET(mBatchSize, 1116);
FMHA_ASSERT_OFFSET(mChunkedAttentionSizeLog2, 1120);
FMHA_ASSERT_OFFSET(mInflateMax, 1124);
FMHA_ASSERT_OFFSET(mLogNumEltsPerSageAttnBlkK, 1128);
FMHA_ASSERT_OFFSET(mLogNumEltsPerSageAttnBlkP, 1132);
FMHA_ASSERT_OFFSET(mLogNumEltsPerSageAttnBlkQ, 1136);
FMHA_ASSERT_OFFSET(mLogNumEltsPerSageAttnBlkV, 1140);
FMHA_ASSERT_OFFSET(mMaxSeqLenQ, 1144);
FMHA_ASSERT_OFFSET(mMaxSeqLenKv, 1148);
FMHA_ASSERT_OFFSET(mMaxNumCtasQ, 1152);
FMHA_ASSERT_OFFSET(mMaxNumCtasKv, 1156);
FMHA_ASSERT_OFFSET(mMaxNumPagesPerSeqKv, 1160);
FMHA_ASSERT_OFFSET(mNumHeadsKv, 1164);
FMHA_ASSERT_OFFSET(mNumHeadsQ, 1168);
FMHA_ASSERT_OFFSET(mNumHeadsQPerKv, 1172);
FMHA_ASSERT_OFFSET(mNumHeadsQPerKvDivisor, 1176);
FMHA_ASSERT_OFFSET(mNumHiddenEltsO, 1192);
FMHA_ASSERT_OFFSET(mNumPagesInMemPool, 1200);
FMHA_ASSERT_OFFSET(mNumTokensPerCtaQ, 1204);
FMHA_ASSERT_OFFSET(mNumTokensPerPageLog2, 1208);
FMHA_ASSERT_OFFSET(mReshapeFactorKv, 1212);
FMHA_ASSERT_OFFSET(mOutputScale, 1216);
FMHA_ASSERT_OFFSET(mScaleSoftmaxLog2, 1220);
FMHA_ASSERT_OFFSET(mScaleSfKv, 1224);
FMHA_ASSERT_OFFSET(mScaleSfO, 1228);
FMHA_ASSERT_OFFSET(mSkipSoftmaxThresholdScaleFactor, 1232);
FMHA_ASSERT_OFFSET(mSparseAttnTopK, 1236);
FMHA_ASSERT_OFFSET(mStartTokenIdxSfO, 1240);
FMHA_ASSERT_OFFSET(mSumOfSeqLensQ, 1244);
FMHA_ASSERT_OFFSET(mSumOfSeqLensKv, 1248);
FMHA_ASSERT_OFFSET(mUseBlockSparseAttention, 1252);
FMHA_ASSERT_OFFSET(mUsesSharedPagedKvIdx, 1253);
FMHA_ASSERT_OFFSET(ptrLse, 1256);
#undef FMHA_ASSERT_OFFSET
static_assert(sizeof(KernelParams) == 1280 && alignof(KernelParams) == 128, "KernelParams changed size");

}  // namespace fmha
