"""``fmha-dispatch demo``: the main job, from lock to checked attention output, on the two reference models.

With an sm_90 GPU and torch each cell is launched, checked against float32 and timed. Without, the run stops before
the launch: kernels are still selected, found and verified.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from typing import Any

from fmha_dispatch import _core
from fmha_dispatch.errors import DeviceError, ExitCode
from fmha_dispatch.explain import H200, MODELS
from fmha_dispatch.plan import AUTO_FAMILIES, GPUS_OF_FAMILY, Choice, choose
from fmha_dispatch.problem import dense_decode_problem
from fmha_dispatch.store import find

Q_LENS = (1, 2, 4, 8)
BATCH_SIZES = (8, 64)

# Relative norm against float32 above which a cell counts as wrong (bf16 rounding of P and of the output).
ERROR_LIMIT = 5e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the demo."""
    parser.add_argument("--kv-len", type=int, default=8192, help="keys of each request, drafts included")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float16")


def run(args: argparse.Namespace) -> int:
    """Prints a line a cell; exit code 2 if an output is wrong."""
    device, why_not = _device()
    cells = []
    for model, (num_heads_q, num_heads_kv, head_dim) in MODELS.items():
        for q_len in Q_LENS:
            for batch_size in BATCH_SIZES:
                problem = dense_decode_problem(
                    dtype=args.dtype,
                    batch_size=batch_size,
                    q_len=q_len,
                    kv_len=args.kv_len,
                    num_heads_q=num_heads_q,
                    num_heads_kv=num_heads_kv,
                    head_dim=head_dim,
                    page_size=args.page_size,
                )
                choice = choose(problem, device)
                find(choice.row.cubin)  # bytes on disk equal the lock, or this raises
                cell = {"model": model, "q_len": q_len, "batch": batch_size, **_facts(choice)}
                if why_not is None:
                    cell |= _launch(problem, args)
                cells.append(cell)
                if not args.json:
                    _print_cell(cell, header=len(cells) == 1)
    wrong = sum(not cell.get("rel_error", 0.0) <= ERROR_LIMIT for cell in cells)  # NaN is wrong
    if args.json:
        print(json.dumps({"kv_len": args.kv_len, "page_size": args.page_size, "stopped": why_not, "cells": cells}))
    elif why_not is not None:
        print(f"stopped before the launch: {why_not}")
    else:
        print(f"{len(cells) - wrong} of {len(cells)} cells within {ERROR_LIMIT:g} of float32")
    return ExitCode.BUG if wrong else ExitCode.OK


def _device() -> tuple[_core.Device, str | None]:
    """The GPU to plan for, and why nothing can be launched on it (None: it can)."""
    from fmha_dispatch.device import describe

    nominal = _core.Device(**H200)
    try:
        device = describe(0)
    except DeviceError as error:
        return nominal, f"{error.message} (planned for an H200; every cubin was found and verified)"
    if not any(device.sm in GPUS_OF_FAMILY[family] for family in AUTO_FAMILIES):
        return nominal, f"GPU 0 is sm_{device.sm}, which has no kernel family yet (planned for an H200)"
    try:
        import torch
    except ImportError:
        return device, "torch is not installed; pip install 'fmha-dispatch[torch]'"
    if not torch.cuda.is_available():
        return device, "torch has no CUDA support here"
    return device, None


def _facts(choice: Choice) -> dict[str, Any]:
    shape = choice.decision.shape
    return {
        "kernel": choice.row.name,
        "grid": list(shape.grid),
        "cluster": shape.cluster,
        "split": shape.num_ctas_kv,
    }


def _print_cell(cell: dict[str, Any], header: bool) -> None:
    launched = "us" in cell
    if header:
        line = f"{'model':11} {'s_qo':>4} {'batch':>5}  {'kernel':34} {'grid':>14} {'cluster':>7} {'split':>5}"
        print(line + (f" {'rel error':>9} {'us':>8} {'GB/s':>6}" if launched else ""))
    grid = "x".join(map(str, cell["grid"]))
    line = (
        f"{cell['model']:11} {cell['q_len']:4} {cell['batch']:5}  {cell['kernel']:34} {grid:>14} "
        f"{cell['cluster']:7} {cell['split']:5}"
    )
    print(
        line + (f" {cell['rel_error']:9.1e} {cell['us']:8.1f} {cell['gb_per_s']:6.0f}" if launched else ""), flush=True
    )


def _launch(problem: _core.Problem, args: argparse.Namespace) -> dict[str, Any]:
    """Random inputs through the public API: error against float32, median time of a CUDA-graph replay, bandwidth."""
    import torch

    from fmha_dispatch.decode import trtllm_batch_decode_with_kv_cache
    from fmha_dispatch.reference import decode_reference

    dtype = getattr(torch, args.dtype)
    batch, heads, dim, page = problem.batch_size, problem.num_heads_kv, problem.head_dim_qk, problem.page_size
    torch.manual_seed(0)
    shape = (problem.num_pages_k, heads, page, dim)
    caches = tuple(torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    query = torch.randn(problem.sum_seq_lens_q, problem.num_heads_q, dim, device="cuda", dtype=dtype)
    tables = torch.randperm(problem.num_pages_k, device="cuda").int().reshape(batch, problem.max_pages_per_seq)
    seq_lens = torch.full((batch,), args.kv_len, dtype=torch.int32, device="cuda")
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    out = torch.full_like(query, math.nan)
    scale, q_len = 1 / math.sqrt(dim), problem.max_seq_len_q

    def call() -> None:
        trtllm_batch_decode_with_kv_cache(
            query, caches, workspace, tables, seq_lens, args.kv_len, scale, 1.0, out=out, q_len_per_req=q_len
        )

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        expected, _ = decode_reference(query, caches, tables, seq_lens, bmm1_scale=scale, q_len_per_req=q_len)
        error = ((out.float() - expected).norm() / expected.norm()).item()
        calls = 16
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                call()
        times = []
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(8):  # the first replay warms up
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    kv_bytes = 2 * batch * args.kv_len * heads * dim * query.element_size()
    io_bytes = kv_bytes + 2 * query.numel() * query.element_size()
    microseconds = statistics.median(times[1:])
    return {"rel_error": error, "us": microseconds, "gb_per_s": io_bytes / microseconds * 1e-3}
