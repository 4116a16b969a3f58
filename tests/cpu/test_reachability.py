"""The reachability report: its rules must not exclude a row that any problem reaches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import golden
import pytest

from fmha_dispatch.manifest import load_manifest

TOOL = Path(__file__).parents[2] / "tools" / "reachability.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reachability", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_row_that_golden_runs_is_excluded(tool: ModuleType) -> None:
    manifest = load_manifest("trtllm-gen")
    taken = tool.architectures(manifest)
    reasons = {manifest[index].name: tool.excluded(manifest[index], taken) for index in range(len(manifest))}
    for item in golden.dispatch():
        if item["expect"]["status"] == "ok":
            assert reasons[item["expect"]["kernel"]] is None, item["problem"]["id"]


def test_most_rows_have_a_witness_and_none_of_the_excluded(tool: ModuleType) -> None:
    manifest = load_manifest("trtllm-gen")
    taken = tool.architectures(manifest)
    witnesses, _ = tool.search(manifest, tries=200, seed=1)
    excluded = {index for index in range(len(manifest)) if tool.excluded(manifest[index], taken)}
    assert not excluded & witnesses.keys()
    assert len(manifest) - len(excluded) < 7400
    assert len(witnesses) > 6600
