"""Hopper selection: rows that exist, launches within limits, refusals in words, for any values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from core_problems import INT64_MAX, paged_problem
from hopper_rows import H200, HEAD_DIMS, hopper_row, hopper_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from fmha_dispatch import _core

MANIFEST = _core.Manifest(_core.Manifest.pack(hopper_rows()))
DEVICE = _core.Device(**H200)


def select(problem: _core.Problem, device: _core.Device = DEVICE, trace: bool = False) -> _core.Decision:
    return _core.select(problem, MANIFEST, device, trace)


def chosen(problem: _core.Problem, device: _core.Device = DEVICE) -> tuple[_core.Row, _core.Shape]:
    decision = select(problem, device)
    assert decision.row >= 0, decision.reason
    return MANIFEST[decision.row], decision.shape


@pytest.mark.parametrize(
    ("heads_q", "q_len", "tile"),
    [
        (8, 1, 8),
        (64, 1, 8),
        (64, 2, 16),
        (96, 1, 16),
        (96, 2, 32),
        (96, 4, 64),
        (96, 8, 128),
        (256, 4, 128),
        (256, 1, 32),
    ],
)
def test_smallest_tile_that_holds_all_packed_rows(heads_q: int, q_len: int, tile: int) -> None:
    row, shape = chosen(paged_problem(heads_q=heads_q, q_len=q_len))
    assert (row.tile_size_q, shape.num_ctas_q) == (tile, 1)
    assert shape.num_tokens_per_cta_q == tile // (heads_q // 8)


def test_more_rows_than_the_largest_tile_read_kv_as_seldom_as_possible() -> None:
    row, shape = chosen(paged_problem(heads_q=96, q_len=16))
    assert (row.tile_size_q, shape.num_ctas_q, shape.num_tokens_per_cta_q) == (128, 2, 10)


def test_a_smaller_tile_serves_when_the_wanted_one_was_never_built() -> None:
    manifest = _core.Manifest(_core.Manifest.pack([hopper_row("BF16", 128, 32, "Disabled")]))
    decision = _core.select(paged_problem(heads_q=64, q_len=5), manifest, DEVICE)
    assert decision.row == 0
    assert (decision.shape.num_ctas_q, decision.shape.num_tokens_per_cta_q) == (2, 4)


@pytest.mark.parametrize(
    ("batch", "mode", "splits"),
    [
        (64, "Disabled", 1),
        (8, "CgaSmemReduction", 2),
        (2, "CgaSmemReduction", 8),
        (1, "GmemReduction", 16),
    ],
)
def test_split_fills_the_gpu(batch: int, mode: str, splits: int) -> None:
    row, shape = chosen(paged_problem(batch=batch, kv_len=8192))
    assert (row.multi_ctas_kv_mode.name, shape.num_ctas_kv) == (mode, splits)
    assert shape.grid == (splits, 8, batch)
    assert shape.cluster == (splits if mode == "CgaSmemReduction" else 1)
    assert (shape.block, shape.smem_bytes) == (row.threads, row.smem_bytes)


def test_scratch_and_counters_only_where_partial_results_go_through_memory() -> None:
    row, shape = chosen(paged_problem(batch=1, kv_len=8192, heads_kv=7, heads_q=7 * 12))
    assert row.multi_ctas_kv_mode.name == "GmemReduction"
    ctas = math.prod(shape.grid)
    assert shape.num_counters == 7 * shape.num_ctas_q
    assert shape.partial_stats_bytes == -(-ctas * row.tile_size_q * 8 // 256) * 256
    assert shape.partial_o_bytes == ctas * row.tile_size_q * 128 * 4
    for batch in (2, 64):
        _, shape = chosen(paged_problem(batch=batch))
        assert (shape.num_counters, shape.partial_stats_bytes, shape.partial_o_bytes) == (0, 0, 0)


@pytest.mark.parametrize("kv_len", [0, 1, 64, 65, 128, 192])
def test_no_split_below_two_tiles_each(kv_len: int) -> None:
    row, shape = chosen(paged_problem(batch=1, heads_kv=1, heads_q=8, kv_len=kv_len))
    assert (row.multi_ctas_kv_mode.name, shape.num_ctas_kv) == ("Disabled", 1)


def test_every_split_has_work() -> None:
    for kv_len in range(64, 64 * 300, 64 * 7):
        _, shape = chosen(paged_problem(batch=1, heads_kv=1, heads_q=8, kv_len=kv_len))
        tiles = -(-kv_len // 64)
        per_cta = -(-tiles // shape.num_ctas_kv)
        assert (shape.num_ctas_kv - 1) * per_cta < tiles
        assert shape.num_ctas_kv == 1 or tiles // shape.num_ctas_kv >= 2


def test_only_tiles_of_the_window_count() -> None:
    _, shape = chosen(paged_problem(batch=1, kv_len=131072, window_left=127))
    assert shape.num_ctas_kv <= 2
    _, shape = chosen(paged_problem(batch=1, kv_len=131072, window_left=4095))
    assert 8 <= shape.num_ctas_kv <= 33


def test_a_wider_window_than_the_sequence_changes_nothing() -> None:
    _, plain = chosen(paged_problem(batch=1))
    for window in (8192, 2**31 - 1, INT64_MAX - 1):
        _, shape = chosen(paged_problem(batch=1, window_left=window))
        assert shape.grid == plain.grid


def test_clusters_never_exceed_what_the_device_takes() -> None:
    row, shape = chosen(paged_problem(batch=2), _core.Device(**H200, max_cluster_size=4))
    assert row.multi_ctas_kv_mode.name == "GmemReduction"
    assert shape.num_ctas_kv == 8


# T2.06 in spirit: every offending field with its value and what would work, and rows that are near.
def test_refusal_names_every_offending_field() -> None:
    problem = paged_problem(head_dim=80, page=48, window_left=127, has_sinks=True, dtype_k=_core.DataType.E4M3)
    decision = select(problem)
    assert decision.row == -1
    assert decision.shape is None
    for words in (
        "dtype_k=E4M3 (allowed: BF16, FP16)",
        "head_dim_qk=80 (allowed: 64, 128, 256)",
        "page_size=48 (allowed: 16, 32, 64, 128)",
        "nearest kernels: sm90a_decode_bf16_d64_q16 (differs in dtype_k, head_dim_qk, head_dim_v, page_size); ",
    ):
        assert words in decision.reason
    assert decision.reason.count("(differs in ") == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 65536}, "batch_size=65536 (allowed: 1..65535 (it is grid.z"),
        ({"heads_kv": 65536, "heads_q": 65536}, "num_heads_kv=65536 (allowed: 1..65535 (it is grid.y))"),
        ({"heads_q": 97}, "num_heads_q=97 (allowed: a multiple of num_heads_kv=8)"),
        ({"heads_q": 8 * 129}, "num_heads_q / num_heads_kv=129 (allowed: at most 128)"),
        ({"heads_kv": 0}, "num_heads_kv=0"),
        ({"max_seq_len_q": 0}, "max_seq_len_q=0"),
        ({"max_seq_len_kv": 2**31}, "max_seq_len_kv=2147483648 (allowed: 0..2147483647)"),
        ({"sum_seq_lens_q": 7}, "sum_seq_lens_q=7 (allowed: batch_size * max_seq_len_q = 8"),
        ({"window_left": -2}, "window_left=-2"),
        ({"num_pages_k": 2**31}, "num_pages_k=2147483648"),
        ({"stride_k_token": 132}, "stride_k_token=132 (allowed: a multiple of 8 elements below 2^40 bytes)"),
        ({"stride_v_page": 2**39}, "stride_v_page=549755813888"),
        ({"stride_q_head": -128}, "stride_q_head=-128"),
        ({"dtype_q": _core.DataType.FP16}, "dtype_q=FP16 (allowed: BF16)"),
        ({"layout": _core.QkvLayout.ContiguousKv}, "layout=ContiguousKv (allowed: PagedKv)"),
    ],
)
def test_refusals(changes: dict[str, Any], words: str) -> None:
    decision = select(paged_problem(**changes))
    assert decision.row == -1
    assert words in decision.reason


def test_refusals_by_device() -> None:
    assert (
        "sm=80 (allowed: 90)"
        in select(paged_problem(), _core.Device(sm=80, sm_count=108, max_smem_bytes=166912)).reason
    )
    small = select(paged_problem(), _core.Device(sm=90, sm_count=132, max_smem_bytes=101376))
    assert "max_smem_bytes=101376 (allowed: at least 200000)" in small.reason
    assert _core.select(paged_problem(), _core.Manifest(_core.Manifest.pack([])), DEVICE).row == -1


def test_largest_batch_launches() -> None:
    _, shape = chosen(paged_problem(batch=65535, kv_len=16))
    assert shape.grid == (1, 8, 65535)


def test_trace_gives_every_other_row_one_reason_and_changes_nothing() -> None:
    problem = paged_problem(batch=2)
    plain, traced = select(problem), select(problem, trace=True)
    assert plain.rejected == []
    assert (plain.row, plain.reason, plain.shape.grid) == (traced.row, traced.reason, traced.shape.grid)
    assert sorted([plain.row] + [row for row, _ in traced.rejected]) == list(range(len(MANIFEST)))
    reasons = {MANIFEST[row].name: reason for row, reason in traced.rejected}
    assert all(reasons.values())
    assert "is preferred for its tile of 16 rows" in reasons["sm90a_decode_bf16_d128_q32_cga"]
    assert "is preferred for its split of 8 by CgaSmemReduction" in reasons["sm90a_decode_bf16_d128_q16_gmem"]
    assert "dtype_q=BF16 (allowed: FP16)" in reasons["sm90a_decode_fp16_d128_q16"]
    unsplit = dict(select(paged_problem(batch=64), trace=True).rejected)
    assert sum("because splitting KV would gain nothing" in reason for reason in unsplit.values()) == 2
    refused = select(paged_problem(batch=65536), trace=True)
    assert len(refused.rejected) == len(MANIFEST) and all(reason for _, reason in refused.rejected)


def check_decision(problem: _core.Problem, device: _core.Device, decision: _core.Decision) -> None:
    """What holds for every answer: refused in words, or a row that exists with a launch that a driver takes."""
    assert decision.reason
    if decision.row < 0:
        assert decision.shape is None
        with pytest.raises(ValueError, match="refusal"):
            _core.fill(problem, MANIFEST, decision, _core.Buffers())
        return
    row, shape = MANIFEST[decision.row], decision.shape
    group = problem.num_heads_q // problem.num_heads_kv
    assert row.tile_size_q >= group
    assert shape.num_tokens_per_cta_q >= 1
    assert shape.num_tokens_per_cta_q * group <= row.tile_size_q
    assert shape.num_ctas_q * shape.num_tokens_per_cta_q >= problem.max_seq_len_q
    assert 1 <= shape.grid[0] <= 2**31 - 1 and 1 <= shape.grid[1] <= 65535 and 1 <= shape.grid[2] <= 65535
    assert shape.grid[0] % shape.cluster == 0
    assert 1 <= shape.cluster <= max(1, device.max_cluster_size)
    assert (shape.num_ctas_kv > 1) == (row.multi_ctas_kv_mode.name != "Disabled")
    per_sm = max(1, min(2048 // row.threads, (device.max_smem_bytes + 1024) // (row.smem_bytes + 1024)))
    assert shape.num_ctas_kv == 1 or math.prod(shape.grid) <= device.sm_count * per_sm
    assert 0 <= shape.num_counters < 2**31
    assert len(_core.fill(problem, MANIFEST, decision, _core.Buffers())) == 1280
    assert len(_core.tensor_maps(problem, MANIFEST, decision, _core.Buffers())) == 3


# T2.01
def test_every_cell_of_the_grid_gets_a_row() -> None:
    for head_dim, group, q_len, page in itertools.product(
        HEAD_DIMS, (1, 2, 4, 8, 16, 32), range(1, 33), (16, 32, 64, 128)
    ):
        problem = paged_problem(head_dim=head_dim, heads_q=8 * group, q_len=q_len, page=page)
        decision = select(problem)
        assert decision.row >= 0, decision.reason
        check_decision(problem, DEVICE, decision)
        assert MANIFEST[decision.row].head_dim_qk == head_dim
    assert select(paged_problem(head_dim=512)).row == -1


# T2.04
@settings(max_examples=3000, deadline=None)
@given(
    group=st.integers(1, 128),
    heads_kv=st.integers(0, 16),
    q_len=st.integers(0, 64),
    batch=st.integers(0, 4096),
    kv_len=st.integers(0, 1 << 20),
    sm_count=st.sampled_from([1, 78, 132, 148, 152]),
    head_dim=st.sampled_from([64, 128, 256, 80]),
    window_left=st.sampled_from([-1, 0, 127, 4096]),
)
def test_serving_values(
    group: int, heads_kv: int, q_len: int, batch: int, kv_len: int, sm_count: int, head_dim: int, window_left: int
) -> None:
    problem = paged_problem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads_q=group * heads_kv,
        heads_kv=heads_kv,
        head_dim=head_dim,
        window_left=window_left,
    )
    device = _core.Device(sm=90, sm_count=sm_count, max_smem_bytes=232448)
    decision = select(problem, device)
    check_decision(problem, device, decision)
    assert (decision.row >= 0) == (head_dim != 80 and heads_kv > 0 and q_len > 0 and batch > 0)


SIZES = [
    name for name in dir(_core.Problem) if not name.startswith("_") and isinstance(getattr(_core.Problem(), name), int)
]
EXTREMES = st.one_of(
    st.integers(-(2**63), INT64_MAX), st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**40, INT64_MAX, -(2**63)])
)


@settings(max_examples=3000, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(SIZES), EXTREMES, max_size=6), trace=st.booleans(), data=st.data())
def test_no_values_whatever_make_it_throw(changes: dict[str, int], trace: bool, data: st.DataObject) -> None:
    problem = paged_problem()
    for name, value in changes.items():
        setattr(problem, name, bool(value & 1) if isinstance(getattr(problem, name), bool) else value)
    device = DEVICE
    if data.draw(st.booleans()):
        int32 = st.integers(-(2**31), 2**31 - 1)
        device = _core.Device(
            sm=90,
            sm_count=data.draw(int32),
            max_smem_bytes=data.draw(int32),
            max_cluster_size=data.draw(int32),
        )
    check_decision(problem, device, select(problem, device, trace))
