#!/usr/bin/env python3
"""Which rows of the trtllm-gen manifest can a call reach? Searches for a witness for each row, names those without.

    tools/reachability.py [--json REPORT] [--tries N]

For each row, problems are drawn whose dtypes, layout, head dims, page, mask and phase are the row's own; the selector
decides. A row that no problem reached is listed under the rule that excludes it, or under "no witness" where none is
known. Takes ten seconds. Exit code 1: a row was reached although a rule excludes it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fmha_dispatch import _core
from fmha_dispatch._core import DataType, KernelType, MaskType, MultiCtasKvMode, QkvLayout, SparseMlaType, TileScheduler
from fmha_dispatch.manifest import load_manifest

MLA_HEAD_DIMS = ((576, 512), (320, 256))
NONE_SPARSE = SparseMlaType(0)
SLIDING = MaskType.SlidingOrChunkedCausal
SEPARATE = MultiCtasKvMode.GmemReductionWithSeparateKernel

# SMs a GPC: whole chips, halves where few large clusters fit, unknown.
GPC_SMS = ([16, 16, 18, 18, 20, 20, 20, 20], [20] * 8, [16, 16, 20, 20, 20, 20, 20, 20], [10] * 14 + [8], [4] * 37)
GROUPS = (1, 2, 4, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
LENGTHS = (32, 200, 513, 1025, 2049, 4096, 8192, 20000, 65536, 262144)
KV_HEADS = (1, 2, 4, 8)
WINDOWS = (127, 511, 1023, 2047, 4095)


def excluded(row: _core.Row, taken: dict[tuple[Any, ...], set[int]]) -> str | None:
    """The rule by which no call can reach `row`, or None."""
    is_mla = (row.head_dim_qk, row.head_dim_v) in MLA_HEAD_DIMS
    is_context = row.kernel_type == KernelType.Context
    if row.layout == QkvLayout.PackedQkv:
        return "no call has Q, K and V packed in one tensor"
    if row.mask == MaskType.Custom:
        return "no call has a custom mask"
    if row.multi_ctas_kv_mode == MultiCtasKvMode.Disabled and row.scheduler == TileScheduler.Static:
        return "kernels that do not split KV are taken with the persistent scheduler"
    if row.sm == 10100 and taken[key(row)] >= {100, 103}:
        return "both GPUs have a kernel of their own for the same key"
    if row.sparse_mla == SparseMlaType.StaticTokenSparse and not is_mla:
        return "static sparse attention is for MLA head dims"
    if row.sparse_mla == SparseMlaType.DynamicTokenSparse and (row.head_dim_qk, row.head_dim_v) != (512, 512):
        return "dynamic sparse attention is for head dims 512/512"
    if not is_context and is_mla and row.mask == SLIDING:
        return "MLA kernels have no sliding window"
    if row.multi_ctas_kv_mode == MultiCtasKvMode.CgaSmemReduction and row.head_dim_v >= 512:
        return "splits are not reduced inside a cluster when V is 512 wide"
    is_keeps = row.kernel_type == KernelType.KeepsMmaAbForGeneration
    if is_keeps and row.multi_ctas_kv_mode == MultiCtasKvMode.CgaSmemReduction and row.mask != SLIDING:
        # With a window the second pass may change the tile after the cluster was chosen.
        return "splits are reduced inside a cluster with swapped operands only"
    if is_mla and row.sparse_mla == NONE_SPARSE and is_keeps:
        if row.multi_ctas_kv_mode == MultiCtasKvMode.GmemReduction:
            return "MLA kernels with kept operands leave the reduction to another kernel"
        if row.tile_size_q != 64:
            return "MLA kernels with kept operands take tiles of 64 rows"
    if is_mla and row.sparse_mla == NONE_SPARSE and not is_keeps and not is_context and row.tile_size_q > 16:
        return "MLA kernels with swapped operands take tiles of 8 or 16 rows unless sparse"
    if row.multi_ctas_kv_mode == SEPARATE and row.dtype_o == DataType.E2M1:
        return "the separate reduction does not write E2M1"
    if row.dynamic_page and row.head_dim_qk != row.head_dim_v:
        return "pages of 128 or more need equal head dims"
    if row.layout == QkvLayout.SeparateQkv and row.mask == SLIDING:
        return "ragged calls have no sliding window"
    return None


def key(row: _core.Row) -> tuple[Any, ...]:
    """What two rows share that differ in architecture only."""
    names = (
        "dtype_q dtype_k dtype_v dtype_o layout mask kernel_type scheduler multi_ctas_kv_mode sparse_mla tile_size_q "
        "tile_size_kv head_dim_per_cta_v head_dim_qk head_dim_v num_tokens_per_page sage_q sage_k sage_p sage_v "
        "dynamic_page uses_2cta_mma skips_softmax"
    )
    return tuple(getattr(row, name) for name in names.split())


def base_problem(row: _core.Row) -> _core.Problem:
    """What follows from the row alone."""
    is_context = row.kernel_type == KernelType.Context
    is_mla = (row.head_dim_qk, row.head_dim_v) in MLA_HEAD_DIMS or row.sparse_mla != NONE_SPARSE
    dense = row.mask == MaskType.Dense if is_context else is_mla
    page = row.num_tokens_per_page
    if row.sparse_mla == SparseMlaType.StaticTokenSparse:
        page = 64
    return _core.Problem(
        dtype_q=row.dtype_q,
        dtype_k=row.dtype_k,
        dtype_v=row.dtype_v,
        dtype_o=row.dtype_o,
        layout=row.layout,
        kernel_type=KernelType.Context if is_context else KernelType.Generation,
        mask=MaskType.Dense if dense else MaskType.Causal,
        head_dim_qk=row.head_dim_qk,
        head_dim_v=row.head_dim_v,
        page_size=page,
        num_pages_k=1024,
        num_pages_v=1024,
        sparse_mla=row.sparse_mla,
        has_sliding_window_pool=row.sparse_mla == SparseMlaType.DynamicTokenSparse,
        sage_block_q=row.sage_q,
        sage_block_k=row.sage_k,
        sage_block_p=row.sage_p,
        sage_block_v=row.sage_v,
        skips_softmax=row.skips_softmax,
    )


def sizes(row: _core.Row, rng: random.Random) -> dict[str, int]:
    """Sizes of one call, drawn where the row can lie."""
    is_context = row.kernel_type == KernelType.Context
    is_mla = (row.head_dim_qk, row.head_dim_v) in MLA_HEAD_DIMS or row.sparse_mla != NONE_SPARSE
    if is_context:
        group, tokens = rng.choice((1, 2, 8)), rng.choice((1, 128))
    elif is_mla or row.dtype_q != row.dtype_k:
        group, tokens = rng.choice(GROUPS), rng.choice(TOKENS)
    else:
        # A tile takes the heads of one group at least, and one with half the rows would do for half the tokens.
        group = rng.choice([group for group in GROUPS if group <= row.tile_size_q])
        tokens = max(1, row.tile_size_q // group * rng.choice((1, 1, 2, 4)) - rng.choice((0, 0, 1)))
    length = rng.choice(LENGTHS) + rng.choice((0, rng.randrange(1000)))
    return {
        "group": group,
        "max_seq_len_q": tokens,
        "batch_size": rng.choice(BATCHES),
        "max_seq_len_kv": length,
        "num_heads_kv": 1 if is_mla else rng.choice(KV_HEADS),
        "window_left": min(length - 2, rng.choice(WINDOWS)) if row.mask == SLIDING else -1,
        "gpcs": rng.randrange(len(GPC_SMS)),
    }


def search(manifest: _core.Manifest, tries: int, seed: int) -> tuple[dict[int, dict[str, int]], int]:
    """A witness by row index, and how many problems were asked."""
    rng = random.Random(seed)
    witnesses: dict[int, dict[str, int]] = {}
    asked = 0
    taken = architectures(manifest)
    possible = [index for index in range(len(manifest)) if excluded(manifest[index], taken) is None]
    # Few rows need many draws: the hard ones get theirs after the easy ones were met by the way.
    for rounds in (tries // 20, tries):
        for index in possible:
            row = manifest[index]
            problem = base_problem(row)
            for attempt in range(rounds):
                if index in witnesses:
                    break
                sm = (100, 103)[attempt % 2] if row.sm == 10100 else row.sm
                drawn = sizes(row, rng)
                set_sizes(problem, row, drawn)
                gpcs = GPC_SMS[drawn["gpcs"]]
                decision = _core.select(problem, manifest, _core.Device(sm, sum(gpcs), 232448, 16, gpcs))
                asked += 1
                if decision.row >= 0 and decision.row not in witnesses:
                    witnesses[decision.row] = {"sm": sm, **drawn}
    return witnesses, asked


def set_sizes(problem: _core.Problem, row: _core.Row, drawn: dict[str, int]) -> None:
    length = drawn["max_seq_len_kv"]
    problem.num_heads_kv = drawn["num_heads_kv"]
    problem.num_heads_q = drawn["group"] * problem.num_heads_kv
    problem.max_seq_len_q, problem.batch_size = drawn["max_seq_len_q"], drawn["batch_size"]
    problem.max_seq_len_kv = length
    problem.sum_seq_lens_q = problem.max_seq_len_q * problem.batch_size
    problem.sum_seq_lens_kv = length * problem.batch_size if row.layout == QkvLayout.SeparateQkv else 0
    problem.max_pages_per_seq = length
    problem.sparse_top_k = min(length, 2048) // 4 * 4 if row.sparse_mla != NONE_SPARSE else 0
    problem.window_left = drawn["window_left"]
    problem.allows_tile_size_kv_64 = row.tile_size_kv == 64


def architectures(manifest: _core.Manifest) -> dict[tuple[Any, ...], set[int]]:
    """Which `sm` have a row for a key."""
    taken: dict[tuple[Any, ...], set[int]] = {}
    for index in range(len(manifest)):
        taken.setdefault(key(manifest[index]), set()).add(manifest[index].sm)
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write witnesses and unreached rows there")
    parser.add_argument("--tries", type=int, default=2000, metavar="N", help="most problems for a row (2000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    manifest = load_manifest("trtllm-gen")
    start = time.monotonic()
    witnesses, asked = search(manifest, args.tries, args.seed)
    taken = architectures(manifest)
    unreached: dict[str, list[str]] = {}
    contradictions = []
    for index in range(len(manifest)):
        row = manifest[index]
        reason = excluded(row, taken)
        if index in witnesses and reason:
            contradictions.append(f"{row.name}: reached although {reason}")
        elif index not in witnesses:
            unreached.setdefault(reason or "no witness", []).append(row.name)
    seconds = time.monotonic() - start
    print(f"{len(manifest)} rows; {len(witnesses)} reached by {asked} problems in {seconds:.0f} s")
    for reason, count in Counter({reason: len(names) for reason, names in unreached.items()}).most_common():
        print(f"{count:6} {reason}")
    for line in contradictions:
        print(line, file=sys.stderr)
    if args.json:
        reached = {manifest[index].name: witness for index, witness in sorted(witnesses.items())}
        args.json.write_text(json.dumps({"reached": reached, "unreached": unreached}, indent=1) + "\n")
    return 1 if contradictions else 0


if __name__ == "__main__":
    sys.exit(main())
