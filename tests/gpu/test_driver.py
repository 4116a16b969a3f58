"""Streams, graphs and loading on the real driver; what the fake driver cannot show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, build, launch

from fmha_dispatch import decode, loader
from fmha_dispatch.errors import NotPrepared

pytestmark = pytest.mark.gpu

# One request of many keys and one KV head: split over more CTAs than a cluster holds, so counted in global memory.
SPLIT = Case(kv_lens=(30_000,), num_heads_kv=1, group=8)


def counts_in_global_memory() -> bool:
    plan = next(reversed(decode._plans.values()))
    assert plan.choice is not None
    return plan.choice.decision.shape.num_counters > 0


def test_t4_03_interleaved_streams_with_a_split_do_not_disturb_each_other(workspace: torch.Tensor) -> None:
    cases = [SPLIT, replace(SPLIT, seed=1)]
    inputs = [build(case) for case in cases]
    spaces = [workspace, torch.full_like(workspace, 0xFF)]
    expected = [launch(case, given, workspace)[0].clone() for case, given in zip(cases, inputs, strict=True)]
    assert counts_in_global_memory()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    outs = [torch.full((250, *given.query.shape), 777.0, dtype=given.query.dtype, device="cuda") for given in inputs]
    torch.cuda.synchronize()
    for step in range(250):
        for case, given, space, stream, out in zip(cases, inputs, spaces, streams, outs, strict=True):
            with torch.cuda.stream(stream):
                launch(replace(case, lse=False), given, space, out=out[step])
    torch.cuda.synchronize()
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out, wanted.expand_as(out))


def test_graphs_captured_on_one_stream_run_side_by_side(workspace: torch.Tensor) -> None:
    cases = [replace(SPLIT, lse=False), replace(SPLIT, seed=1, lse=False)]
    inputs = [build(case) for case in cases]
    spaces = [workspace, torch.full_like(workspace, 0xFF)]
    expected = [launch(case, given, workspace)[0].clone() for case, given in zip(cases, inputs, strict=True)]
    assert counts_in_global_memory()
    outs = [torch.full_like(given.query, 777.0) for given in inputs]
    capture_stream = torch.cuda.Stream()  # never launched on before
    graphs = []
    for case, given, space, out in zip(cases, inputs, spaces, outs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture_stream):
            for _ in range(20):
                launch(case, given, space, out=out)
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out, wanted)


def test_t4_04_an_unloaded_kernel_under_capture_leaves_the_capture_whole(
    workspace: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kv_lens=(100, 200))
    inputs = build(case)
    launch(case, inputs, workspace)
    out = torch.full_like(inputs.query, 777.0)
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(decode, "_plans", {})
    marks: Any = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(NotPrepared, match="prepare"):
            launch(replace(case, lse=False), inputs, workspace, out=out)
        marks.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert marks.item() == 1


def test_loading_while_another_stream_is_captured_leaves_that_capture_whole(
    workspace: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(SPLIT, lse=False)
    inputs = build(case)
    out = torch.full_like(inputs.query, 777.0)
    expected = launch(case, inputs, workspace)[0].clone()
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(decode, "_plans", {})
    marks: Any = torch.zeros(1, device="cuda")
    eager = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with torch.cuda.stream(eager):
            launch(case, inputs, workspace, out=out)
        marks.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert marks.item() == 1
    assert torch.equal(out, expected)
