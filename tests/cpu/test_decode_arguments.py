"""Bad input of every argument of the decode call gives a typed error that says what was found and what would work."""

from __future__ import annotations

from typing import Any

import pytest
from fake_tensor import FakeTensor

import fmha_dispatch
from fmha_dispatch import _core
from fmha_dispatch.errors import InvalidArgument, Unsupported
from fmha_dispatch.kv_cache import paged_kv
from fmha_dispatch.problem import DecodeTensors, decode_problem, dense_decode_problem
from fmha_dispatch.tensors import view

B, Q_LEN, HQ, HKV, D, PAGE, PAGES, WIDTH = 4, 2, 16, 2, 128, 16, 40, 8


def arguments(**changed: Any) -> dict[str, Any]:
    """A valid call, with some arguments replaced."""
    call: dict[str, Any] = {
        "query": FakeTensor((B * Q_LEN, HQ, D)),
        "kv_cache": (FakeTensor((PAGES, HKV, PAGE, D)), FakeTensor((PAGES, HKV, PAGE, D))),
        "workspace_buffer": FakeTensor((2**20,), "uint8"),
        "block_tables": FakeTensor((B, WIDTH), "int32"),
        "seq_lens": FakeTensor((B,), "int32"),
        "max_seq_len": WIDTH * PAGE,
        "out": FakeTensor((B * Q_LEN, HQ, D)),
        "q_len_per_req": Q_LEN,
    }
    return {**call, **changed}


def kv(shape: tuple[int, ...] = (PAGES, HKV, PAGE, D), dtype: str = "bfloat16", **more: Any) -> FakeTensor:
    return FakeTensor(shape, dtype, **more)


BAD = {
    "query is None": {"query": None},
    "query rank": {"query": FakeTensor((B * Q_LEN, HQ * D))},
    "query on the CPU": {"query": FakeTensor((B * Q_LEN, HQ, D), device=-1)},
    "query has gaps": {"query": FakeTensor((B * Q_LEN, HQ, D), strides=(HQ * D * 2, D * 2, 2))},
    "query rows": {"query": FakeTensor((B * Q_LEN + 1, HQ, D)), "out": None},
    "query heads": {"query": FakeTensor((B * Q_LEN, 15, D)), "out": None},
    "query head_dim": {"query": FakeTensor((B * Q_LEN, HQ, 64)), "out": None},
    "kv_cache is None": {"kv_cache": None},
    "kv_cache of three": {"kv_cache": (kv(), kv(), kv())},
    "kv_cache rank 5 of three": {"kv_cache": kv((PAGES, 3, HKV, PAGE, D))},
    "kv_cache rank": {"kv_cache": (kv((PAGES, PAGE, D)), kv((PAGES, PAGE, D)))},
    "K and V shapes": {"kv_cache": (kv(), kv((PAGES - 1, HKV, PAGE, D)))},
    "K and V dtypes": {"kv_cache": (kv(), kv(dtype="float16"))},
    "K on another device": {"kv_cache": (kv(device=1), kv(device=1))},
    "V has gaps": {"kv_cache": (kv(), kv(strides=(HKV * PAGE * D * 2, PAGE * D * 2, D * 2, 2)))},
    "kv_layout": {"kv_layout": "DNH"},
    "workspace is a number": {"workspace_buffer": 5},
    "workspace on the CPU": {"workspace_buffer": FakeTensor((2**20,), "uint8", device=-1)},
    "workspace strided": {"workspace_buffer": FakeTensor((2**10,), "uint8", strides=(2,))},
    "block_tables int64": {"block_tables": FakeTensor((B, WIDTH), "int64")},
    "block_tables rank": {"block_tables": FakeTensor((B, 2, WIDTH), "int32")},
    "block_tables rank, unshared": {"uses_shared_paged_kv_idx": False},
    "block_tables batch": {"block_tables": FakeTensor((B + 1, WIDTH), "int32")},
    "block_tables empty": {"block_tables": FakeTensor((B, 0), "int32")},
    "block_tables strided": {"block_tables": FakeTensor((B, WIDTH), "int32", strides=(2 * WIDTH, 2))},
    "block_tables overlapping": {"block_tables": FakeTensor((B, WIDTH), "int32", strides=(1, 1))},
    "seq_lens int64": {"seq_lens": FakeTensor((B,), "int64")},
    "seq_lens length": {"seq_lens": FakeTensor((B - 1,), "int32")},
    "seq_lens strided": {"seq_lens": FakeTensor((B,), "int32", strides=(2,))},
    "max_seq_len negative": {"max_seq_len": -1},
    "max_seq_len float": {"max_seq_len": 128.0},
    "max_seq_len tensor": {"max_seq_len": FakeTensor((1,), "int32")},
    "max_seq_len huge": {"max_seq_len": 2**31},
    "window_left negative": {"window_left": -2},
    "window_left float": {"window_left": 1.5},
    "q_len_per_req zero": {"q_len_per_req": 0},
    "q_len_per_req missing": {"q_len_per_req": None},
    "max_q_len without cum_seq_lens_q": {"q_len_per_req": None, "max_q_len": 2},
    "cum_seq_lens_q without max_q_len": {"q_len_per_req": None, "cum_seq_lens_q": FakeTensor((B + 1,), "int32")},
    "cum_seq_lens_q and q_len_per_req": {"max_q_len": 2, "cum_seq_lens_q": FakeTensor((B + 1,), "int32")},
    "cum_seq_lens_q dtype": {
        "q_len_per_req": None,
        "max_q_len": 2,
        "cum_seq_lens_q": FakeTensor((B + 1,), "int64"),
    },
    "out shape": {"out": FakeTensor((B * Q_LEN, HQ * D))},
    "out dtype": {"out": FakeTensor((B * Q_LEN, HQ, D), "float16"), "out_dtype": "bfloat16"},
    "out strided": {"out": FakeTensor((B * Q_LEN, HQ, D), strides=(HQ * D * 2, D, 1))},
    "out on another device": {"out": FakeTensor((B * Q_LEN, HQ, D), device=1)},
    "sinks length": {"sinks": FakeTensor((HQ + 1,), "float32")},
    "sinks dtype": {"sinks": FakeTensor((HQ,), "bfloat16")},
    "sinks list of two": {"sinks": [FakeTensor((HQ,), "float32")] * 2},
    "lse shape": {"lse": FakeTensor((B * Q_LEN, HQ + 1), "float32")},
    "lse dtype": {"lse": FakeTensor((B * Q_LEN, HQ), "float16")},
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_argument(name: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        fmha_dispatch.trtllm_batch_decode_with_kv_cache(**arguments(**BAD[name]))
    error = caught.value
    assert error.found is not None or error.asked is not None or error.fix is not None, str(error)


UNHONOURED = {
    "o_sf_scale": 1.0,
    "o_sf_vec_size": 16,
    "o_scale": 0.5,
    "mask": FakeTensor((B, Q_LEN, 2), "uint16"),
    "skip_softmax_threshold_scale_factor": 0.0,
    "kv_cache_sf": (kv(), kv()),
    "multi_ctas_kv_counter_buffer": FakeTensor((8,), "int32"),
    "enable_block_sparse_attention": True,
    "bf16q_fp8kv_transform_mode": "k_only",
}


@pytest.mark.parametrize("name", UNHONOURED)
def test_keyword_that_is_not_honoured_is_named(name: str) -> None:
    with pytest.raises(Unsupported, match=name):
        fmha_dispatch.trtllm_batch_decode_with_kv_cache(**arguments(**{name: UNHONOURED[name]}))


@pytest.mark.parametrize(
    "changed",
    [
        {"query": FakeTensor((B * Q_LEN, HQ, D), "float32"), "out": None},
        {"kv_cache": (kv(dtype="uint8"), kv(dtype="uint8"))},
        {"out": None, "out_dtype": "nvfp4"},
        {"backend": "xqa"},
    ],
)
def test_well_formed_but_unsupported(changed: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        fmha_dispatch.trtllm_batch_decode_with_kv_cache(**arguments(**changed))
    assert caught.value.fix is not None


def problem_of(**changed: Any) -> _core.Problem:
    call = arguments(**changed)
    key, value = paged_kv(call["kv_cache"], call.get("kv_layout", "HND"))
    return decode_problem(
        DecodeTensors(
            query=view("query", call["query"]),
            key=key,
            value=value,
            block_tables=view("block_tables", call["block_tables"]),
            seq_lens=view("seq_lens", call["seq_lens"]),
            workspace=view("workspace_buffer", call["workspace_buffer"]),
        ),
        max_seq_len=call["max_seq_len"],
        q_len_per_req=Q_LEN,
        uses_shared_paged_kv_idx=call.get("uses_shared_paged_kv_idx", True),
    )


def test_layouts_are_strides_only() -> None:
    """HND, NHD and a stacked rank-5 cache state the same shape with their own strides."""
    hnd = problem_of()
    assert (hnd.stride_k_page, hnd.stride_k_head, hnd.stride_k_token) == (HKV * PAGE * D, PAGE * D, D)
    nhd = problem_of(kv_cache=(kv((PAGES, PAGE, HKV, D)), kv((PAGES, PAGE, HKV, D))), kv_layout="NHD")
    assert (nhd.stride_k_page, nhd.stride_k_head, nhd.stride_k_token) == (HKV * PAGE * D, D, HKV * D)
    stacked = kv((PAGES, 2, HKV, PAGE, D))
    key, value = paged_kv(stacked, "HND")
    assert key.shape == (PAGES, HKV, PAGE, D) and value.ptr - key.ptr == HKV * PAGE * D * 2
    assert key.strides[0] == 2 * HKV * PAGE * D
    alone_key, alone_value = paged_kv(kv((PAGES, 1, HKV, PAGE, D)), "HND")
    assert alone_key.ptr == alone_value.ptr


def test_sliced_table_reports_its_pitch() -> None:
    tables = FakeTensor((B, WIDTH), "int32", strides=(512, 1))
    assert problem_of(block_tables=tables).max_pages_per_seq == 512
    both = FakeTensor((B, 2, WIDTH), "int32", strides=(2 * 512, 512, 1))
    assert problem_of(block_tables=both, uses_shared_paged_kv_idx=False).max_pages_per_seq == 512


def test_table_width_needs_no_alignment() -> None:
    """T2.17: any width is a width."""
    for width in (1, 33, 295):
        assert problem_of(block_tables=FakeTensor((B, width), "int32")).max_pages_per_seq == width


def test_dense_problem_equals_the_one_from_tensors() -> None:
    dense = dense_decode_problem(
        dtype="bfloat16",
        batch_size=B,
        q_len=Q_LEN,
        kv_len=WIDTH * PAGE,
        num_heads_q=HQ,
        num_heads_kv=HKV,
        head_dim=D,
        page_size=PAGE,
    )
    tensors = problem_of()
    for name in (
        "batch_size",
        "max_seq_len_q",
        "max_seq_len_kv",
        "stride_q_token",
        "stride_k_page",
        "max_pages_per_seq",
    ):
        assert getattr(dense, name) == getattr(tensors, name), name
