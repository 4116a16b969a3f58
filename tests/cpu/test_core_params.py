"""KernelParams and tensor maps of our own families, field by field."""

from __future__ import annotations

import struct

import pytest
from core_problems import paged_problem
from hopper_rows import H200, hopper_rows
from hypothesis import given
from hypothesis import strategies as st

from fmha_dispatch import _core

MANIFEST = _core.Manifest(_core.Manifest.pack(hopper_rows()))
DEVICE = _core.Device(**H200)

# Offsets from NVIDIA's layout (artifact 158f6fa11e): the test must not share the header with the code.
POINTERS = {
    "o": 912,
    "sinks": 928,
    "cum_seq_lens_q": 936,
    "counters": 984,
    "output_scale_ptr": 992,
    "block_tables": 1000,
    "scratch": 1016,
    "scale_softmax_log2_ptr": 1056,
    "seq_lens_kv": 1080,
    "lse": 1256,
}
PARTIAL_O = 1008
INTS = {
    "window": 1112,
    "batch": 1116,
    "max_q": 1144,
    "max_kv": 1148,
    "ctas_q": 1152,
    "ctas_kv": 1156,
    "max_pages": 1160,
    "heads_kv": 1164,
    "heads_q": 1168,
    "group": 1172,
    "pool": 1200,
    "tokens_per_cta": 1204,
    "page_log2": 1208,
    "reshape": 1212,
    "sum_q": 1244,
}
FLOATS = {"output_scale": 1216, "scale_log2": 1220}


def fill(problem: _core.Problem, buffers: _core.Buffers) -> tuple[bytes, _core.Decision]:
    decision = _core.select(problem, MANIFEST, DEVICE)
    assert decision.row >= 0, decision.reason
    return _core.fill(problem, MANIFEST, decision, buffers), decision


def read(params: bytes, code: str, offset: int) -> int | float:
    return struct.unpack_from("<" + code, params, offset)[0]


def maps(problem: _core.Problem, **buffers: int) -> dict[str, dict[str, object]]:
    decision = _core.select(problem, MANIFEST, DEVICE)
    assert decision.row >= 0, decision.reason
    return {m.pop("slot"): m for m in _core.tensor_maps(problem, MANIFEST, decision, _core.Buffers(**buffers))}


def test_every_field_of_a_split_launch() -> None:
    problem = paged_problem(batch=1, q_len=2, kv_len=8000, heads_q=64, page=32, window_left=4095)
    addresses = {name: 0x7F00_0000_0000 + 4096 * i for i, name in enumerate(POINTERS)}
    buffers = _core.Buffers(**addresses, scale_softmax_log2=0.125, output_scale=2.5)
    params, decision = fill(problem, buffers)
    shape = decision.shape
    assert MANIFEST[decision.row].multi_ctas_kv_mode.name == "GmemReduction"
    assert len(params) == 1280
    assert params[:896] == bytes(896)
    for name, offset in POINTERS.items():
        assert read(params, "Q", offset) == addresses[name], name
    assert read(params, "Q", PARTIAL_O) == addresses["scratch"] + shape.partial_stats_bytes
    expected = {
        "window": 4096,
        "batch": 1,
        "max_q": 2,
        "max_kv": 8000,
        "ctas_q": 1,
        "ctas_kv": shape.num_ctas_kv,
        "max_pages": 250,
        "heads_kv": 8,
        "heads_q": 64,
        "group": 8,
        "pool": 250,
        "tokens_per_cta": 2,
        "page_log2": 5,
        "reshape": 1,
        "sum_q": 2,
    }
    assert {name: read(params, "i", offset) for name, offset in INTS.items()} == expected
    assert {name: read(params, "f", offset) for name, offset in FLOATS.items()} == {
        "output_scale": 2.5,
        "scale_log2": 0.125,
    }
    assert read(params, "q", 1192) == 64 * 128
    assert params[1253] == 1


def test_unsplit_launch_gets_no_partial_pointers() -> None:
    params, _ = fill(paged_problem(batch=64), _core.Buffers(scratch=0x1000, counters=0x2000))
    assert (read(params, "Q", PARTIAL_O), read(params, "Q", POINTERS["scratch"])) == (0, 0)


def test_page_ids_of_k_and_v_apart() -> None:
    params, _ = fill(paged_problem(uses_shared_paged_kv_idx=False), _core.Buffers())
    assert params[1253] == 0


@pytest.mark.parametrize(("window_left", "size"), [(-1, 2**31 - 1), (0, 1), (2**31 - 2, 2**31 - 1), (2**40, 2**31 - 1)])
def test_window_size_counts_the_row_itself(window_left: int, size: int) -> None:
    params, _ = fill(paged_problem(window_left=window_left), _core.Buffers())
    assert read(params, "i", INTS["window"]) == size


def test_group_divisor_divides() -> None:
    for group in range(1, 129):
        params, _ = fill(paged_problem(heads_q=group * 8), _core.Buffers())
        divisor, multiplier, add, shift = struct.unpack_from("<iIIi", params, 1176)
        assert (divisor, add, shift) == (group, 0, (group - 1).bit_length() - 1)
        if group > 1:
            for n in (0, 1, group - 1, group, 12345, 2**31 - 1):
                assert (n * multiplier >> 32) >> shift == n // group
        else:
            assert multiplier == 2**31


def test_tensor_maps_of_a_dense_cache() -> None:
    found = maps(paged_problem(batch=8, q_len=4, heads_q=96, page=16, kv_len=8192), q=0x1000, k=0x2000, v=0x3000)
    common = {"dtype": 9, "rank": 4, "elem_strides": [1, 1, 1, 1], "interleave": 0, "swizzle": 3, "l2": 2, "oob": 0}
    kv = {"dims": [128, 16, 8, 4096], "strides": [256, 4096, 32768], "box": [64, 16, 1, 1]}
    assert found == {
        "tmaQ_": common
        | {"addr": 0x1000, "dims": [128, 12, 8, 32], "strides": [256, 3072, 24576], "box": [64, 12, 1, 5]},
        "tmaK_": common | kv | {"addr": 0x2000},
        "tmaV_": common | kv | {"addr": 0x3000},
    }
    assert maps(paged_problem(dtype=_core.DataType.FP16))["tmaK_"]["dtype"] == 6


def test_k_and_v_keep_their_own_strides() -> None:
    found = maps(paged_problem(stride_v_token=8 * 128, stride_v_head=128, num_pages_v=9))
    assert found["tmaK_"]["strides"] == [256, 4096, 32768]
    assert found["tmaV_"]["strides"] == [2048, 256, 32768]
    assert found["tmaV_"]["dims"] == [128, 16, 8, 9]


def test_a_page_of_two_tiles_is_read_a_tile_at_a_time() -> None:
    assert maps(paged_problem(page=128))["tmaK_"]["box"] == [64, 64, 1, 1]


# T3.16: a dimension of size 1 may have any stride.
SIZE_1_STRIDES = [
    f"stride_{tensor}_{axis}" for tensor in "qkv" for axis in ("token" if tensor == "q" else "page", "head")
]


@given(
    st.dictionaries(st.sampled_from(SIZE_1_STRIDES), st.sampled_from([0, 1, 7, 128, 2**40, -1, 2**63 - 1, -(2**63)]))
)
def test_strides_of_size_1_dimensions_do_not_matter(strides: dict[str, int]) -> None:
    sizes = {"batch": 1, "heads_q": 1, "heads_kv": 1, "kv_len": 16}
    assert maps(paged_problem(**sizes, **strides)) == maps(paged_problem(**sizes))


@given(stride=st.integers(0, 2**20))
def test_strides_of_other_dimensions_are_16_byte_multiples_or_refused(stride: int) -> None:
    decision = _core.select(paged_problem(stride_k_head=stride), MANIFEST, DEVICE)
    assert (decision.row >= 0) == (stride % 8 == 0)


# T3.19: page offsets beyond 32 bits.
@pytest.mark.parametrize("pages", [2**31 // 16384 - 1, 2**31 // 16384 + 1, 2**32 // 16384 + 1, 2**31 - 1])
def test_large_pools_are_addressed_in_64_bits(pages: int) -> None:
    page_stride = 8 * 2 * 16 * 128 * 80  # a pool shared by 80 layers
    found = maps(
        paged_problem(num_pages_k=pages, num_pages_v=pages, stride_k_page=page_stride, stride_v_page=page_stride)
    )
    assert found["tmaK_"]["dims"][3] == pages
    assert found["tmaK_"]["strides"][2] == page_stride * 2


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_unaligned_addresses_are_refused_in_words(name: str) -> None:
    with pytest.raises(ValueError, match=f"tma{name.upper()}_: address is 4104, must be 16-byte aligned"):
        maps(paged_problem(), **{name: 4104})
