"""The command run inside the test's process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fmha_dispatch import cli


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code and the document on stdout."""
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)
