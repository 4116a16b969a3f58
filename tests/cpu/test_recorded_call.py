"""Recorded launcher calls against the runner's parameters that NVIDIA's launcher made of them."""

from __future__ import annotations

import copy
from typing import Any

import golden
import pytest

from fmha_dispatch import _core
from fmha_dispatch.recorded_call import CallRefused, RecordedCall, read_call

# Categories that the launcher itself decides: no runner parameters exist in these cases.
LAUNCHER_CATEGORIES = {
    "dsv4_topk_mod4",
    "head_dim_qk",
    "head_dim_vo",
    "heads_indivisible",
    "missing_block_scales",
    "noncausal_sliding",
    "o_sf_vec_size",
    "sparse_non_mla",
    "unsupported_arch",
    "unsupported_dtype",
    "workspace_counter",
    "workspace_softmax",
}
# Fields that this launcher version never sets, with what they hold.
NEVER_SET = {
    "kvPtr": "0x0",
    "qkvPtr": "0x0",
    "customMaskPtr": "0x0",
    "customMaskOffsetsPtr": "0x0",
    "firstSparseMaskOffsetsKvPtr": "0x0",
    "kvSfScalePtr": "0x0",
    "oSfScalePtr": "0x0",
    "useGmemScale": False,
    "mMaxSeqLenCacheKv": 0,
    "mScaleQ": 0.0,
    "mScaleOutput": 0.0,
    "mChunkedAttentionSize": 2**31 - 1,
}


def runner_params(call: RecordedCall) -> dict[str, Any]:
    """The call in the names of the runner's struct."""
    p, b = call.problem, call.buffers
    is_paged = p.layout == _core.QkvLayout.PagedKv
    is_generation = p.kernel_type == _core.KernelType.Generation
    has_fp4_kv = p.dtype_k == _core.DataType.E2M1
    num_pages = p.num_pages_k if b.k == b.v else p.num_pages_k + p.num_pages_v
    return NEVER_SET | {
        "sm": call.device.sm,
        "stream": hex(call.stream),
        "enable_pdl": call.enable_pdl,
        "dtypeQ": p.dtype_q.name,
        "dtypeK": p.dtype_k.name,
        "dtypeV": p.dtype_v.name,
        "dtypeO": p.dtype_o.name,
        "mQkvLayout": p.layout.value,
        "mMaskType": p.mask.value,
        "mKernelType": p.kernel_type.value,
        "mTileScheduler": 0 if is_generation else 1,
        "mMultiCtasKvMode": is_generation,
        "qPtr": hex(b.q),
        "kPtr": hex(b.k),
        "vPtr": hex(b.v),
        "slidingWindowKvPoolPtr": hex(b.sliding_window_pool),
        "kSfBasePtr": hex(b.k_sf),
        "vSfBasePtr": hex(b.v_sf),
        "sparseMlaTopKLensPtr": hex(b.sparse_top_k_lens),
        "multiCtasKvCounterPtr": hex(b.counters),
        "seqLensKvPtr": hex(b.seq_lens_kv),
        "cumSeqLensQPtr": hex(b.cum_seq_lens_q),
        "cumSeqLensKvPtr": hex(b.cum_seq_lens_kv),
        "kvPageIdxPtr": hex(b.block_tables),
        "outputScalePtr": hex(b.output_scale_ptr),
        "outputScale": b.output_scale,
        "scaleSoftmaxLog2Ptr": hex(b.scale_softmax_log2_ptr),
        "scaleSoftmaxLog2": b.scale_softmax_log2,
        "multiCtasKvScratchPtr": hex(b.scratch),
        "softmaxStatsPtr": hex(b.softmax_stats),
        "lsePtr": hex(b.lse),
        "lseStrideTokens": call.lse_strides[0],
        "lseStrideHeads": call.lse_strides[1],
        "ptrSageAttnSfsQ": hex(b.sage_sf_q),
        "ptrSageAttnSfsK": hex(b.sage_sf_k),
        "ptrSageAttnSfsP": hex(b.sage_sf_p),
        "ptrSageAttnSfsV": hex(b.sage_sf_v),
        "ptrAttentionSinks": hex(b.sinks),
        "oPtr": hex(b.o),
        "oSfPtr": hex(b.o_sf),
        # Unpaged queries are taken as contiguous, which the recorded ones are.
        "qStrideTokens": p.stride_q_token if is_paged else 0,
        "qStrideHeads": p.stride_q_head if is_paged else 0,
        "kStrideKeysValues": p.stride_k_token,
        "kStrideHeads": p.stride_k_head,
        "kStrideBatch": p.stride_k_page,
        "vStrideKeysValues": p.stride_v_token,
        "vStrideHeads": p.stride_v_head,
        "vStrideBatch": p.stride_v_page,
        "kSfStrideHeads": p.stride_kv_sf_head if has_fp4_kv else 0,
        "kSfStrideBatch": p.stride_kv_sf_page if has_fp4_kv else 0,
        "vSfStrideHeads": p.stride_kv_sf_head if has_fp4_kv else 0,
        "vSfStrideBatch": p.stride_kv_sf_page if has_fp4_kv else 0,
        "mHeadDimQk": p.head_dim_qk,
        "mHeadDimV": p.head_dim_v,
        "mNumHeadsQ": p.num_heads_q,
        "mNumHeadsKv": p.num_heads_kv,
        "mNumHeadsQPerKv": p.num_heads_q // p.num_heads_kv,
        "mBatchSize": p.batch_size,
        "mMaxSeqLenQ": p.max_seq_len_q,
        "mMaxSeqLenKv": p.max_seq_len_kv,
        "mAttentionWindowSize": 2**31 - 1 if p.window_left == -1 else p.window_left + 1,
        "mSumOfSeqLensQ": p.sum_seq_lens_q,
        "mSumOfSeqLensKv": p.sum_seq_lens_kv,
        "mMaxNumPagesPerSeqKv": p.max_pages_per_seq,
        "mNumTokensPerPage": p.page_size,
        "mNumPagesInMemPool": num_pages,
        "mMultiProcessorCount": call.device.sm_count,
        "mSfStartTokenIdx": b.start_token_sf_o,
        "mScaleSfKv": b.scale_sf_kv,
        "mScaleSfO": b.scale_sf_o,
        "mSkipsSoftmaxWhenPossible": p.skips_softmax,
        "mSkipSoftmaxThresholdScaleFactor": b.skip_softmax_factor,
        "mSparseMlaType": p.sparse_mla.value,
        "mSparseMlaTopK": p.sparse_top_k,
        "mHasSlidingWindowKvPool": p.has_sliding_window_pool,
        "mUsesSharedPagedKvIdx": p.uses_shared_paged_kv_idx,
    }


def test_every_recorded_call_becomes_the_runner_params_that_were_recorded() -> None:
    checked = 0
    for item in golden.dispatch():
        expected = item["expect"]["runner_params"]
        if expected is None:
            continue
        found = runner_params(read_call(item["problem"]))
        assert found == expected, (item["problem"]["id"], {k: v for k, v in found.items() if v != expected.get(k)})
        checked += 1
    assert checked > (5000 if golden.is_complete else 50)


def test_the_launcher_refuses_what_was_refused_and_nothing_else() -> None:
    refused = set()
    for item in golden.dispatch():
        category = item["expect"].get("category")
        if item["expect"]["runner_params"] is not None:
            continue
        assert category in LAUNCHER_CATEGORIES
        with pytest.raises(CallRefused) as error:
            read_call(item["problem"])
        assert error.value.category == category, item["problem"]["id"]
        refused.add(category)
    assert len(refused) >= 10


def test_device_is_the_recorded_one_and_the_tile_switch_is_exactly_one() -> None:
    for item in golden.dispatch():
        problem = item["problem"]
        if item["expect"]["runner_params"] is None:
            continue
        call = read_call(problem)
        assert list(call.device.gpc_sms) == problem["device"]["gpc_sms"]
        switch = problem.get("env", {}).get("TRTLLM_GEN_ENABLE_TILE_SIZE_KV64")
        assert call.problem.allows_tile_size_kv_64 == (switch == "1")


def decode_record() -> dict[str, Any]:
    """A recorded decode call that runs, to be changed at will."""
    return copy.deepcopy(
        next(
            item["problem"]
            for item in golden.dispatch()
            if item["expect"]["status"] == "ok"
            and item["problem"]["fn"] == "trtllm_paged_attention_decode"
            and item["problem"]["args"]["key_cache"]["dtype"] == "bfloat16"
            and item["problem"]["args"]["lse"] is None
        )
    )


def test_other_functions_and_sparse_attention_without_mla_are_refused() -> None:
    with pytest.raises(CallRefused, match="no launcher function 'fmha'") as error:
        read_call(decode_record() | {"fn": "fmha"})
    assert error.value.category == "unknown_function"
    record = decode_record()
    record["args"]["sparse_mla_top_k"] = 64
    with pytest.raises(CallRefused, match="sparse attention is for MLA") as error:
        read_call(record)
    assert error.value.category == "sparse_non_mla"


def test_head_dims_of_value_and_out_must_agree() -> None:
    record = decode_record()
    record["args"]["out"]["shape"][-1] *= 2
    with pytest.raises(CallRefused) as error:
        read_call(record)
    assert error.value.category == "head_dim_vo"


def test_workspace_is_carved_in_order_and_the_rest_is_scratch() -> None:
    record = decode_record()
    args = record["args"]
    args["workspace_buffer"]["ptr"] = "0x1003"
    args["workspace_size"] = 13 + 8 * 2**20 + 100
    call = read_call(record)
    assert (call.buffers.counters, call.buffers.softmax_stats) == (0x1010, 0)
    assert (call.buffers.scratch, call.scratch_bytes) == (0x1010 + 8 * 2**20, 100)
    args["workspace_size"] = 12 + 8 * 2**20
    with pytest.raises(CallRefused, match="counters need 8388608") as error:
        read_call(record)
    assert error.value.category == "workspace_counter"
