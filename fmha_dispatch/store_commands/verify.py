"""``fmha-dispatch verify``: every copy in every layer, read and checked as before a load. Opens no connection.

A family of which nothing was ever brought to this machine is named as such and is no fault: a Hopper node needs none of
NVIDIA's Blackwell cubins. Once one of its cubins is here, or an option names it, all must be.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter

from fmha_dispatch.errors import ExitCode
from fmha_dispatch.lockfile import Artifact
from fmha_dispatch.sources import DATA, read_file
from fmha_dispatch.store import Store
from fmha_dispatch.store_commands import add_store_arguments, chosen, emit, open_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of verify."""
    add_store_arguments(parser)
    parser.add_argument(
        "--layer",
        action="append",
        choices=("folder", "pack", "package", "cache", "mirror"),
        help="only layers of this kind (default: all); repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Exit code 4 if anything is damaged, else 3 if anything that should be here is in none of the chosen layers."""
    store = open_store(args)
    sources = [source for source in store.sources if args.layer is None or source.kind in args.layer]
    damaged: list[dict[str, str]] = []
    missing: list[Artifact] = []
    brought: set[str] = set()  # families with a cubin that did not come with this package
    copies = 0
    for artifact in (artifacts := chosen(args, store.lock)):
        found = False
        for source in sources:
            result = store.local(artifact, [source])
            found |= result.cubin is not None
            copies += result.cubin is not None
            if result.faults or (result.cubin is not None and source.kind != "pack"):
                brought.add(artifact.family)
            damaged += [
                {"path": artifact.path, "layer": source.name, "fault": str(fault)} for _, fault in result.faults
            ]
        if not found:
            missing.append(artifact)
    named = bool(args.family or args.arch or args.path or args.match)
    absent = {} if named else Counter(artifact.family for artifact in missing if store.urls(artifact))
    absent = {family: count for family, count in absent.items() if family not in brought}
    missing = [artifact for artifact in missing if artifact.family not in absent]
    damaged += _damaged_tables(store, args.family)
    report = {
        "artifacts": len(artifacts),
        "layers": [source.name for source in sources],
        "good_copies": copies,
        "damaged": damaged,
        "missing": [artifact.path for artifact in missing],
        "not_brought": absent,
    }
    lines = [f"damaged: {entry['fault']}" for entry in damaged]
    lines += [f"missing: {artifact.path}" for artifact in missing]
    lines += [
        f"not on this machine, and not asked for: {count} cubins of {family} (--family {family} checks them)"
        for family, count in absent.items()
    ]
    lines.append(
        f"{len(artifacts) - sum(absent.values())} cubins in {len(sources)} layer(s): {copies} good copies, "
        f"{len(damaged)} damaged, {len(missing)} missing"
    )
    emit(args, report, lines)
    if damaged:
        return ExitCode.INTEGRITY
    return ExitCode.MISSING_OFFLINE if missing else ExitCode.OK


def _damaged_tables(store: Store, families: list[str] | None) -> list[dict[str, str]]:
    """Manifest tables that are not those of the lock."""
    damaged = []
    for name, family in sorted(store.lock.families.items()):
        table = family.table
        if table is None or (families and name not in families):
            continue
        data = read_file(DATA / table.file, table.size)
        if data is None or hashlib.sha256(data).hexdigest() != table.sha256:
            fault = f"manifest table {table.file}: " + ("no such file" if data is None else "wrong digest")
            damaged.append({"path": table.file, "layer": "package", "fault": fault})
    return damaged
