"""trtllm-gen selection for problems that nobody recorded: a row that exists or a refusal in words, nothing else."""

from __future__ import annotations

import random
from typing import Any

import pytest
from core_problems import paged_problem
from hypothesis import given, settings
from hypothesis import strategies as st

from fmha_dispatch import _core
from fmha_dispatch.manifest import load_manifest

D, MASK, KERNEL, LAYOUT = _core.DataType, _core.MaskType, _core.KernelType, _core.QkvLayout
SPARSE = _core.SparseMlaType
MODES = [mode for mode in _core.MultiCtasKvMode if mode.name.startswith("Gmem")]
NUM_RANDOM = 100_000
CODES = {
    "dynamic_page_not_pow2",
    "head_dim_range",
    "heads_indivisible",
    "heads_per_cta",
    "kernel_not_found",
    "missing_kernel_context",
    "missing_kernel_decode",
    "missing_kernel_ragged",
    "mla_sliding",
    "overflow_32bit",
    "page_not_pow2",
    "sparse_topk_mod4",
    "tensor_layout",
    "tile_not_pow2",
    "two_cta_shape",
}


@pytest.fixture(scope="module")
def manifest() -> _core.Manifest:
    return load_manifest("trtllm-gen")


def device(sm: int = 100, sm_count: int = 148) -> _core.Device:
    return _core.Device(
        sm=sm, sm_count=sm_count, max_smem_bytes=232448, max_cluster_size=16, gpc_sms=[20, 20, 20, 18, 18, 18, 18, 16]
    )


def random_problem(rng: random.Random) -> _core.Problem:
    """Mostly what a server could ask for, sometimes what it should not."""
    kind = rng.choice(["decode", "decode", "decode", "context", "mla", "sparse", "ragged"])
    dtype_q = rng.choice([D.BF16, D.FP16, D.E4M3])
    dtype_kv = rng.choice([dtype_q, dtype_q, dtype_q, D.E4M3, D.E2M1])
    heads_kv = 1 if kind in ("mla", "sparse") else rng.choice([1, 2, 4, 8, 16])
    group = rng.choice([1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 64, 96, 128, rng.randint(1, 128)])
    head_dim = rng.choice([64, 128, 256, 512, 80, rng.randint(1, 600)])
    dims = rng.choice([(576, 512), (320, 256)]) if kind in ("mla", "sparse") else (head_dim, head_dim)
    batch = rng.choice([1, 2, 8, 64, 300, rng.randint(1, 70_000)])
    q_len = 1 if rng.random() < 0.4 else rng.randint(1, 40)
    kv_len = rng.choice([0, 1, 100, 1024, 8192, 131072, rng.randint(0, 1 << 20)])
    changes: dict[str, Any] = {
        "dtype_k": dtype_kv,
        "dtype_v": dtype_kv,
        "dtype_o": rng.choice([dtype_q, D.BF16, D.E4M3, D.E2M1]),
        "head_dim_qk": dims[0],
        "head_dim_v": dims[1],
        "window_left": rng.choice([-1, -1, -1, 0, 127, 4096, -5]),
        "skips_softmax": rng.random() < 0.1,
        "allows_tile_size_kv_64": rng.random() < 0.2,
    }
    if kind in ("context", "ragged"):
        changes |= {"kernel_type": KERNEL.Context, "mask": rng.choice([MASK.Dense, MASK.Causal])}
    if kind == "ragged":
        changes |= {"layout": LAYOUT.SeparateQkv, "page_size": 0, "sum_seq_lens_kv": batch * kv_len}
        changes |= dict.fromkeys(("sage_block_q", "sage_block_v"), rng.choice([0, 0, 1]))
    if kind in ("mla", "sparse"):
        changes["mask"] = MASK.Dense
    if kind == "sparse":
        changes |= {"sparse_mla": SPARSE.StaticTokenSparse, "sparse_top_k": rng.choice([64, 2048, 63])}
    return paged_problem(
        dtype=dtype_q,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads_q=group * heads_kv,
        heads_kv=heads_kv,
        head_dim=dims[0],
        page=rng.choice([16, 32, 64, 128, 256, 48, rng.randint(1, 300)]),
        **changes,
    )


def check_decision(
    problem: _core.Problem, manifest: _core.Manifest, on: _core.Device, decision: _core.Decision
) -> None:
    """What holds for every answer."""
    assert decision.reason
    if decision.row < 0:
        assert decision.code in CODES, (decision.code, decision.reason)
        assert decision.shape is None
        if decision.code.startswith(("missing_kernel", "kernel_not_found")):
            assert "; nearest kernels: " in decision.reason
        return
    assert decision.code == ""
    row, shape = manifest[decision.row], decision.shape
    assert row.sm in (on.sm, 10100)
    assert (row.dtype_q, row.dtype_k, row.dtype_o) == (problem.dtype_q, problem.dtype_k, problem.dtype_o)
    assert (row.head_dim_qk, row.head_dim_v) == (problem.head_dim_qk, problem.head_dim_v)
    assert row.skips_softmax == problem.skips_softmax
    assert all(1 <= size <= 2**31 - 1 for size in shape.grid)
    assert shape.num_tokens_per_cta_q >= 1
    assert shape.num_ctas_q >= 1 and shape.num_ctas_kv >= 1
    assert 1 <= shape.cluster <= 16 and shape.grid[0] % shape.cluster == 0
    # A split never exceeds one wave, and what it leaves behind fits where its address was put.
    if shape.num_ctas_kv > 1:
        ctas = shape.grid[0] * shape.grid[1] * shape.grid[2]
        assert ctas <= on.sm_count
        if row.multi_ctas_kv_mode in MODES:
            assert 8 * ctas * row.tile_size_q <= shape.partial_stats_bytes
            assert shape.partial_o_bytes > 0
    assert len(_core.fill(problem, manifest, decision, _core.Buffers())) == 1280
    reduction = _core.separate_reduction(problem, manifest, decision, on)
    assert (reduction is not None) == (row.multi_ctas_kv_mode.name == "GmemReductionWithSeparateKernel")


def test_random_problems_get_a_row_that_exists_or_a_refusal(manifest: _core.Manifest) -> None:
    rng = random.Random(20250801)
    rows, codes = set(), set()
    for _ in range(NUM_RANDOM):
        problem, on = random_problem(rng), device(rng.choice([100, 103]), rng.choice([1, 132, 148, 160]))
        decision = _core.select(problem, manifest, on)
        check_decision(problem, manifest, on, decision)
        rows.add(decision.row)
        codes.add(decision.code)
    assert len(rows) > 1000
    assert len(codes) > 8


SIZES = [
    name
    for name in dir(_core.Problem)
    if not name.startswith("_") and isinstance(getattr(_core.Problem(), name), int) and not name.startswith("stride")
]
EXTREMES = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63)])
)


@settings(max_examples=2000, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(SIZES), EXTREMES, max_size=5), seed=st.integers(0, 2**32))
def test_no_values_whatever_make_it_throw(manifest: _core.Manifest, changes: dict[str, int], seed: int) -> None:
    problem = random_problem(random.Random(seed))
    for name, value in changes.items():
        setattr(problem, name, bool(value & 1) if isinstance(getattr(problem, name), bool) else value)
    check_decision(problem, manifest, device(), _core.select(problem, manifest, device()))


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"batch_size": 2**31}, "overflow_32bit", "batch_size=2147483648 (allowed: 1..2147483647)"),
        ({"num_heads_q": 97}, "heads_indivisible", "num_heads_q=97 (allowed: a multiple of num_heads_kv=8)"),
        ({"page_size": 48}, "page_not_pow2", "page_size=48 (allowed: 16, 32, 64, or a power of two from 128)"),
        ({"page_size": 192}, "dynamic_page_not_pow2", "page_size=192"),
        ({"head_dim_qk": 2048, "head_dim_v": 2048}, "head_dim_range", "head dim 2048 (allowed: 32..1024)"),
        ({"dtype_o": D.FP32}, "missing_kernel_decode", "no kernel for dtypes=BF16/BF16/BF16/FP32, layout=PagedKv"),
        # The key keeps eighths of a head dim: 132 must not get a kernel for 128.
        ({"head_dim_qk": 132, "head_dim_v": 132}, "missing_kernel_decode", "head_dims=132/132"),
    ],
)
def test_refusals(manifest: _core.Manifest, changes: dict[str, Any], code: str, words: str) -> None:
    decision = _core.select(paged_problem(**changes), manifest, device())
    assert (decision.row, decision.code) == (-1, code)
    assert words in decision.reason


def test_nearest_kernels_say_what_is_different(manifest: _core.Manifest) -> None:
    problem = paged_problem(batch=1, heads_q=8, dtype_o=D.FP32)
    reason = _core.select(problem, manifest, device()).reason
    nearest = reason.split("nearest kernels: ")[1].split("; ")
    assert len(nearest) == 3
    assert all("dtype_o=" in row for row in nearest)


def test_a_cluster_that_does_not_fit_falls_back_to_global_memory(manifest: _core.Manifest) -> None:
    problem = paged_problem(batch=1, heads_q=64, kv_len=8192)
    fits = _core.select(problem, manifest, device())
    assert manifest[fits.row].multi_ctas_kv_mode.name == "CgaSmemReduction"
    nowhere = _core.Device(sm=100, sm_count=148, max_smem_bytes=232448, gpc_sms=[1] * 148)
    falls_back = _core.select(problem, manifest, nowhere)
    assert manifest[falls_back.row].multi_ctas_kv_mode.name == "GmemReduction"
    assert "partial results go through global memory" in falls_back.reason
    assert falls_back.shape.cluster == 1
