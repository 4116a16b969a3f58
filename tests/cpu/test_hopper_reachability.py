"""T2.03b: every row of the shipped hopper table serves some call; a kernel that nobody can get is a mistake."""

from __future__ import annotations

import itertools

from core_problems import paged_problem
from hopper_rows import H200

from fmha_dispatch import _core
from fmha_dispatch.manifest import load_manifest


def test_every_row_is_reached() -> None:
    manifest = load_manifest("hopper")
    device = _core.Device(**H200)
    dims = sorted({manifest[i].head_dim_qk for i in range(len(manifest))})
    reached = {
        _core.select(
            paged_problem(dtype=dtype, head_dim=dim, batch=batch, heads_q=8 * group, q_len=q_len, kv_len=65536),
            manifest,
            device,
        ).row
        for dtype, dim, group, q_len, batch in itertools.product(
            (_core.DataType.BF16, _core.DataType.FP16), dims, (1, 8, 16), (1, 2, 4, 8), (1, 4, 64)
        )
    }
    assert {manifest[i].name for i in set(range(len(manifest))) - reached} == set()
