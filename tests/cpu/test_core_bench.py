"""tools/bench/core: no undefined behaviour for random values, no allocation on the warm path."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench" / "core"

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def bench(*arguments: str) -> str:
    done = subprocess.run([str(BENCH), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_random_problems_under_the_sanitizers(tmp_path: Path) -> None:
    (tmp_path / "empty.cpp").write_text("int main() {}\n")
    probe = ["c++", "-fsanitize=address,undefined", "empty.cpp", "-o", "empty"]
    if subprocess.run(probe, cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("the compiler has no sanitizers")
    lines = bench("--fuzz", "20000").splitlines()
    assert len(lines) == len(list((ROOT / "fmha_dispatch" / "data").glob("*.manifest")))
    for line in lines:
        match = re.search(r": 20000 problems, (\d+) with a kernel$", line)
        assert match and int(match[1]) > 1000, line


def test_warm_path_allocates_nothing() -> None:
    warm = re.findall(r"\(warm\) +([\d.]+) ns +([\d.]+) allocations", bench())
    assert len(warm) == 4
    assert all(float(allocations) == 0 for _, allocations in warm)
    # Far above what it takes (0.13 us together), far below the budget of a call (5 us).
    assert all(float(nanoseconds) < 1000 for nanoseconds, _ in warm)
