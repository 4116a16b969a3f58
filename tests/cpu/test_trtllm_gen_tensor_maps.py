"""Tensor maps of trtllm-gen kernels beyond the recorded problems: odd strides, long ragged batches, large pools."""

from __future__ import annotations

from typing import Any

import pytest
from core_problems import paged_problem
from hypothesis import given
from hypothesis import strategies as st
from trtllm_gen_rows import trtllm_gen_row

from fmha_dispatch import _core

D = _core.DataType
DEVICE = _core.Device(sm=100, sm_count=148, max_smem_bytes=232448, gpc_sms=[148])


def row(**changes: Any) -> dict[str, Any]:
    meta = {
        "funcName": "kernel",
        "dtypeQ": "BF16",
        "dtypeK": "BF16",
        "dtypeV": "BF16",
        "dtypeO": "BF16",
        "sm": 10100,
        "tileSizeQ": 8,
        "tileSizeKv": 128,
        "stepQ": 8,
        "stepKv": 128,
        "headDimPerCtaV": 128,
        "headDimQk": 128,
        "headDimV": 128,
        "numTokensPerPage": 16,
        "threadsPerCta": 512,
        "smemBytes": 150000,
        "sageQ": 0,
        "sageK": 0,
        "sageP": 0,
        "sageV": 0,
        "groupsHeadsQ": True,
        "groupsTokensHeadsQ": True,
        "dynamicPage": False,
        "reuseSmemKForV": False,
        "uses2CtaMma": False,
        "skipsSoftmax": False,
        "qkvLayout": 2,
        "maskType": 1,
        "kernelType": 2,
        "tileScheduler": 1,
        "multiCtasKvMode": 0,
        "sparseAttn": 0,
    }
    return trtllm_gen_row(meta | changes)


# One KV tile: the first pass wants a split, the second knows that there is none.
DECODE = [row(funcName="split", tileScheduler=0, multiCtasKvMode=1), row()]
CONTEXT = [row(kernelType=0, tileSizeQ=128, stepQ=256, groupsHeadsQ=False, groupsTokensHeadsQ=False, qkvLayout=0,
               numTokensPerPage=0, headDimQk=192)]  # fmt: skip


def maps(problem: _core.Problem, rows: list[dict[str, Any]] = DECODE, **addresses: int) -> dict[str, dict[str, Any]]:
    manifest = _core.Manifest(_core.Manifest.pack(rows))
    decision = _core.select(problem, manifest, DEVICE)
    assert decision.row >= 0, decision.reason
    return {m.pop("slot"): m for m in _core.tensor_maps(problem, manifest, decision, _core.Buffers(**addresses))}


def single(**changes: Any) -> _core.Problem:
    return paged_problem(batch=1, heads_q=1, heads_kv=1, kv_len=16, **changes)


# T3.16: whatever TMA would refuse as the stride of a dimension of size 1 means nothing.
@given(st.dictionaries(
    st.sampled_from(["stride_k_head", "stride_v_head", "stride_q_head"]),
    st.sampled_from([0, 1, 7, -1, 2**40]),
    min_size=1,
))  # fmt: skip
def test_odd_strides_of_size_1_dimensions_are_harmless(strides: dict[str, int]) -> None:
    for slot, found in maps(single(**strides)).items():
        for size, stride in zip(found["dims"][1:], found["strides"], strict=True):
            assert 0 <= stride < 2**40 and stride % 16 == 0, (slot, size)


@pytest.mark.parametrize("stride", [4, 2**39, -128])
def test_strides_of_other_dimensions_are_checked(stride: int) -> None:
    manifest = _core.Manifest(_core.Manifest.pack(DECODE))
    problem = paged_problem(batch=1, heads_q=8, heads_kv=8, kv_len=16, stride_k_head=stride)
    decision = _core.select(problem, manifest, DEVICE)
    assert (decision.row, decision.code) == (-1, "tensor_layout")
    assert "tmaK_: stride of dimension 2" in decision.reason


# T3.18: 131,072 tokens, 128 heads of 192.
@pytest.mark.parametrize("tokens", [131_072, 10_000_000])
def test_long_ragged_batches_have_positive_strides(tokens: int) -> None:
    problem = _core.Problem(
        **dict.fromkeys(("dtype_q", "dtype_k", "dtype_v", "dtype_o"), D.BF16),
        layout=_core.QkvLayout.SeparateQkv,
        kernel_type=_core.KernelType.Context,
        batch_size=4,
        max_seq_len_q=tokens // 4,
        max_seq_len_kv=tokens // 4,
        sum_seq_lens_q=tokens,
        sum_seq_lens_kv=tokens,
        num_heads_q=128,
        num_heads_kv=128,
        head_dim_qk=192,
        head_dim_v=128,
        stride_k_token=128 * 192,
        stride_k_head=192,
        stride_k_page=tokens * 128 * 192,
        stride_v_token=128 * 128,
        stride_v_head=128,
        stride_v_page=tokens * 128 * 128,
    )
    for name, found in maps(problem, CONTEXT).items():
        assert all(0 <= stride < 2**40 and stride % 16 == 0 for stride in found["strides"]), name
        assert all(1 <= size <= 2**32 for size in found["dims"])
        assert all(1 <= size <= 256 for size in found["box"])


# T3.19: page offsets beyond 32 bits.
def test_large_pools_are_addressed_in_64_bits() -> None:
    page_stride = 8 * 16 * 128 * 80 * 2
    problem = paged_problem(batch=1, heads_q=8, heads_kv=8, kv_len=16, stride_k_page=page_stride,
                            stride_v_page=page_stride, num_pages_k=70_000, num_pages_v=70_000)  # fmt: skip
    found = maps(problem, k=4096, v=8192)
    assert found["tmaK_"]["strides"][2] == page_stride * 2
    assert found["tmaK_"]["dims"][3] == 140_000
    assert maps(problem, k=4096, v=4096)["tmaK_"]["dims"][3] == 70_000
