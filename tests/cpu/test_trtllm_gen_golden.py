"""Every golden problem, decided here and compared with what NVIDIA's host code decided."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import golden
import pytest
from trtllm_gen_rows import trtllm_gen_row

from fmha_dispatch import _core
from fmha_dispatch.manifest import load_manifest
from fmha_dispatch.recorded_call import read_call
from fmha_dispatch.replay import FAMILY, replay

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"
COMPARED = ("kernel", "launch", "params_hex", "tma", "reduction", "lse_kernel")


@pytest.fixture(scope="module")
def manifest() -> _core.Manifest:
    """The shipped table, which is complete wherever the golden data is only a sample."""
    return load_manifest(FAMILY)


def known_differences() -> set[str]:
    return set(re.findall(r"\b(?:ctx|dec|mla|rag|edge|hunt|dsv4|cost|sage|seed)-\d+\b", DIFFERENCES.read_text("utf-8")))


def mismatches(expect: dict[str, Any], found: dict[str, Any]) -> list[str]:
    if expect["status"] != found["status"]:
        return ["status"]
    if expect["status"] == "error":
        return [] if expect["category"] == found["error"]["category"] else ["category"]
    return [field for field in COMPARED if expect[field] != found[field]]


def test_shipped_rows_are_those_of_the_metadata(manifest: _core.Manifest) -> None:
    shipped = {manifest[i].name: manifest[i] for i in range(len(manifest))}
    assert len(shipped) == len(manifest) == 13452
    for meta in golden.kernels():
        row = shipped[meta["funcName"]]
        assert row.key == int(meta["hashId"], 16), row.name
        expected = trtllm_gen_row(meta)
        assert Path(row.cubin).name == expected.pop("cubin")
        for column, value in expected.items():
            found = getattr(row, column)
            assert (found.name if column.startswith("dtype_") else found) == value, (row.name, column)


def test_every_problem_is_decided_as_recorded(manifest: _core.Manifest) -> None:
    differing: dict[str, list[str]] = {}
    start = time.perf_counter()
    for item in golden.dispatch():
        found = mismatches(item["expect"], replay(item["problem"], manifest))
        if found:
            differing[item["problem"]["id"]] = found
    seconds = time.perf_counter() - start
    unexplained = {name: found for name, found in differing.items() if name not in known_differences()}
    assert not unexplained
    if golden.is_complete:
        assert len(golden.dispatch()) == 5282
        assert set(differing) == known_differences()
        assert len(golden.dispatch()) / seconds >= 2000


def test_where_we_differ_a_refusal_became_a_kernel_that_exists(manifest: _core.Manifest) -> None:
    """And the first attempt, by NVIDIA's rules alone, was the recorded refusal."""
    for item in golden.dispatch():
        if item["problem"]["id"] not in known_differences():
            continue
        call = read_call(item["problem"])
        decision = _core.select(call.problem, manifest, call.device)
        assert decision.row >= 0
        assert f"NVIDIA's own rules refuse this call ({item['expect']['category']})" in decision.reason


def test_the_list_of_differences_is_short() -> None:
    assert len(DIFFERENCES.read_text("utf-8").splitlines()) <= 30
