"""``fmha-dispatch replay``: files in, files out, and lines that are no calls."""

from __future__ import annotations

import copy
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import golden
import pytest

from fmha_dispatch import cli
from fmha_dispatch.errors import ExitCode
from fmha_dispatch.settings import LIMITS

FIELDS = ["id", "status", "kernel", "launch", "params_hex", "tma", "reduction", "lse_kernel", "error"]


def some_problems() -> list[dict[str, Any]]:
    """One of each function and outcome."""
    seen = {}
    for item in golden.dispatch():
        seen.setdefault((item["problem"]["fn"], item["expect"].get("category")), item)
    return list(seen.values())


def read_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_file_to_file(tmp_path: Path, bare: bool, suffix: str) -> None:
    items = some_problems()
    text = "".join(json.dumps(item["problem"] if bare else item) + "\n\n" for item in items)
    source, target = tmp_path / f"in.jsonl{suffix}", tmp_path / f"out.jsonl{suffix}"
    source.write_bytes(gzip.compress(text.encode()) if suffix else text.encode())
    assert cli.main(["replay", str(source), "--out", str(target)]) == ExitCode.OK
    records = read_lines(target)
    assert len(records) == len(items)
    for item, record in zip(items, records, strict=True):
        assert list(record) == FIELDS
        assert record["id"] == item["problem"]["id"]
        if record["status"] == "ok" and item["expect"]["status"] == "ok":
            for field in FIELDS[2:8]:
                assert record[field] == item["expect"][field], (record["id"], field)
        elif record["status"] == "error":
            assert record["error"]["category"] == item["expect"]["category"]
            assert record["error"]["message"]
            assert all(record[field] is None for field in FIELDS[2:8])


def test_stdout_and_lines_that_are_no_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = next(item for item in some_problems() if item["expect"]["status"] == "ok")
    no_query = copy.deepcopy(good)
    no_query["problem"]["args"]["query"] = None
    huge = copy.deepcopy(good)
    huge["problem"]["args"]["batch_size"] = 2**80
    lines = [good, "{", "[1]", {"id": "x", "fn": "nothing"}, {"id": "y"}, no_query, huge, good]
    source = tmp_path / "in.jsonl"
    source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    assert cli.main(["replay", str(source)]) == ExitCode.USER
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["status"] for r in records] == [
        "ok",
        "malformed",
        "malformed",
        "error",
        "malformed",
        "malformed",
        "malformed",
        "ok",
    ]
    assert records[3]["error"]["category"] == "unknown_function"
    assert records[4]["id"] == "y" and "line 5" in records[4]["error"]["message"]


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\x1f\x8b\x08 damaged"])
def test_unreadable_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None) -> None:
    source = tmp_path / ("in.jsonl.gz" if content and content.startswith(b"\x1f") else "in.jsonl")
    if content is not None:
        source.write_bytes(content)
    assert cli.main(["replay", str(source)]) == ExitCode.USER
    assert "cannot replay" in capsys.readouterr().err


def run_bounded(source: str, tmp_path: Path, text: str | None = None) -> tuple[int, list[dict[str, Any]], str, int]:
    """Exit code, records, stderr and peak MiB of a replay in a process of its own, with `text` on its stdin."""
    code = (
        "import re, sys; from fmha_dispatch import cli; code = cli.main(sys.argv[1:]); "
        "peak = re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1]; "
        "print(int(peak) >> 10, file=sys.stderr); sys.exit(code)"
    )
    out = tmp_path / "out.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", source, "--out", str(out)],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,  # in the checkout, the package without its extension would be found first
    )
    *message, peak = done.stderr.splitlines()
    return done.returncode, read_lines(out), "\n".join(message), int(peak)


@pytest.mark.parametrize("kind", ["device", "gzip", "stdin"])
def test_line_without_end(tmp_path: Path, kind: str) -> None:
    """A line of any length costs the limit and no more: an error for it, and the lines before it are answered."""
    good = json.dumps(next(item for item in some_problems() if item["expect"]["status"] == "ok"))
    source, text, before = "/dev/zero", None, 0
    if kind == "gzip":
        source, before = str(tmp_path / "bomb.jsonl.gz"), 1
        with gzip.open(source, "wb", compresslevel=1) as bomb:
            bomb.write(good.encode() + b"\n")
            for _ in range(256):
                bomb.write(bytes(1 << 20))
    elif kind == "stdin":
        source, before = "-", 1
        text = good + "\n" + "[" * (LIMITS.call_chars * (LIMITS.call_lines + 2))
    code, records, message, peak = run_bounded(source, tmp_path, text)
    assert code == ExitCode.USER
    assert [record["status"] for record in records] == ["ok"] * before + ["malformed"]
    assert f"line {before + 1} is no recorded call" in records[-1]["error"]["message"]
    assert f"longer than {LIMITS.call_chars} characters" in records[-1]["error"]["message"]
    assert "cannot replay" in message and f"line {before + 1} has no end" in message
    assert peak < 128


def test_long_line_among_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json.dumps(next(item for item in some_problems() if item["expect"]["status"] == "ok"))
    longest = good[:-1] + " " * (LIMITS.call_chars - len(good)) + "}"
    lines = [good, '"' + "x" * (3 * LIMITS.call_chars) + '"', longest, longest + " ", "[" * 100_000, good]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    assert cli.main(["replay", str(source)]) == ExitCode.USER
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["status"] for record in records] == ["ok", "malformed", "ok", "malformed", "malformed", "ok"]
    assert [record["error"]["message"][:7] for record in records if record["status"] == "malformed"] == [
        "line 2 ",
        "line 4 ",
        "line 5 ",
    ]


def test_scratch_that_is_too_small_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for item in golden.dispatch():
        mode = "MultiCtasKvVar" in (item["expect"].get("kernel") or "")
        if mode and item["problem"]["fn"] == "trtllm_paged_attention_decode" and not item["problem"]["args"]["lse"]:
            break
    else:
        pytest.fail("no problem with partial results in global memory")
    item = copy.deepcopy(item)
    item["problem"]["args"]["workspace_size"] = (8 << 20) + 4096
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(item))
    assert cli.main(["replay", str(source)]) == ExitCode.OK
    record = json.loads(capsys.readouterr().out)
    assert record["error"]["category"] == "workspace_scratch"


def test_trace_tells_how_the_rules_came_to_the_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = next(i for i in golden.dispatch() if i["problem"]["set"] == "cost_model")
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(item))
    assert cli.main(["replay", "--trace", str(source)]) == ExitCode.OK
    record = json.loads(capsys.readouterr().out)
    assert list(record) == [*FIELDS, "trace"]
    assert any(step.startswith("cost model: tile ") for step in record["trace"])
    passes = [step for step in record["trace"] if step.startswith("pass ")]
    assert record["kernel"] in passes[-1]
