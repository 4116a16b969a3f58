"""Golden data of NVIDIA's host code: all of it where it lies beside the checkout, else the committed sample.

``python tests/golden.py`` writes the sample anew.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

COMPLETE = Path(__file__).parents[2] / "shared" / "golden"
SAMPLE = Path(__file__).parent / "data" / "golden"
DISPATCH, KERNELS = "dispatch_public.jsonl.gz", "kernel_meta.jsonl.gz"

is_complete = (COMPLETE / DISPATCH).exists()


@cache
def dispatch() -> list[dict[str, Any]]:
    """Recorded problems with what was expected of them."""
    return list(_read((COMPLETE if is_complete else SAMPLE) / DISPATCH))


@cache
def kernels() -> list[dict[str, Any]]:
    """Rows of NVIDIA's metadata table, with facts from the ELF files."""
    return list(_read((COMPLETE if is_complete else SAMPLE) / KERNELS))


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _write(path: Path, items: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(item, separators=(",", ":")) + "\n" for item in items)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def _write_sample() -> None:
    """Two problems of each kind and outcome; each row they run and every 500th."""
    problems: list[dict[str, Any]] = []
    seen: dict[tuple[Any, ...], int] = {}
    for item in dispatch():
        problem, expect = item["problem"], item["expect"]
        outcome = expect.get("category") or (
            len(expect["occupancy"]),
            expect["reduction"] is None,
            expect["lse_kernel"] is None,
            expect["launch"]["attrs"][1]["value"],
        )
        kind = (problem["fn"], problem["set"], outcome)
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= 2:
            problems.append(item)
    used = {name for item in problems for name in item["expect"]["functions_loaded"]}
    rows = [row for row in kernels() if row["idx"] % 500 == 0 or row["funcName"] in used]
    SAMPLE.mkdir(parents=True, exist_ok=True)
    _write(SAMPLE / DISPATCH, problems)
    _write(SAMPLE / KERNELS, rows)
    print(f"{len(problems)} problems, {len(rows)} kernels")


if __name__ == "__main__":
    _write_sample()
