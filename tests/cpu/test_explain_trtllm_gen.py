"""``fmha-dispatch explain --gpu``: the choice for a Blackwell GPU, on a machine that has none."""

from __future__ import annotations

import json

import pytest

from fmha_dispatch import cli
from fmha_dispatch.errors import ExitCode


def explain(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = cli.main(["explain", *options])
    return code, capsys.readouterr().out


def test_kernel_and_the_steps_that_led_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = explain(capsys, "--gpu", "b200", "--batch-size", "4", "--q-len", "4", "--kv-len", "600", "--json")
    report = json.loads(out)
    assert (code, report["family"], report["supported"]) == (ExitCode.OK, "trtllm-gen", True)
    assert report["steps"][-1].startswith("pass ") and report["kernel"] in report["steps"][-1]
    assert any(step.startswith("cost model: tile ") for step in report["steps"])


def test_sm_103_prefers_its_own_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--head-dim", "128", "--q-len", "1", "--batch-size", "64", "--dtype", "float16", "--json")
    kernels = {gpu: json.loads(explain(capsys, "--gpu", gpu, *options)[1])["kernel"] for gpu in ("b200", "b300")}
    assert kernels["b200"].startswith("fmhaSm100")
    assert kernels["b300"].startswith(("fmhaSm103a", "fmhaSm100f"))


def test_a_difference_from_nvidias_rules_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = explain(capsys, "--gpu", "b200", "--num-heads-q", "8", "--page-size", "128")
    assert code == ExitCode.OK
    assert "NVIDIA's own rules refuse this call (missing_kernel_decode)" in out
    assert "second attempt, beyond NVIDIA's rules" in out


def test_a_refusal_names_the_nearest_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = explain(capsys, "--gpu", "b200", "--head-dim", "96")
    assert code == ExitCode.USER
    assert "head_dims=96/96" in out
    assert "nearest kernels: " in out and "(head_dim_qk=64, head_dim_v=64)" in out
