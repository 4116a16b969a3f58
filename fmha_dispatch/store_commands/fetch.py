"""``fmha-dispatch fetch``: every chosen cubin on this machine, verified, or a complete list of those that are not."""

from __future__ import annotations

import argparse
import sys
import threading

from fmha_dispatch.console import path_option
from fmha_dispatch.errors import ExitCode
from fmha_dispatch.lockfile import Artifact
from fmha_dispatch.store_commands import add_store_arguments, chosen, emit, open_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of fetch."""
    add_store_arguments(parser)
    parser.add_argument(
        "--dest", type=path_option, metavar="DIR", help="also copy them below DIR, for FMHA_DISPATCH_CUBIN_DIR"
    )


def run(args: argparse.Namespace) -> int:
    """Exit code of the worst error: 4 before 5 before 3.

    Raises:
        ArtifactMissing: offline; with the list of all that is missing.
        StoreError: the cache or the destination cannot be written.
    """
    store = open_store(args)
    artifacts = chosen(args, store.lock)
    if store.offline:
        store.require(artifacts)
    progress = _Progress(len(artifacts))
    errors = store.fetch_all(artifacts, progress)
    progress.close()
    good = [artifact for artifact in artifacts if artifact.path not in errors]
    if args.dest is not None:
        store.copy_to(args.dest.absolute(), good)
    report = {
        "requested": len(artifacts),
        "available": len(good),
        "bytes": sum(artifact.size for artifact in good),
        "errors": [{"path": path, **error.to_json()} for path, error in errors.items()],
    }
    # The first errors whole, then every name: thousands of them mostly have one cause.
    lines = [
        str(error) if index < _WHOLE_ERRORS else f"{path}: not available either"
        for index, (path, error) in enumerate(errors.items())
    ]
    lines.append(f"{len(good)} of {len(artifacts)} cubins available, {report['bytes']} bytes")
    emit(args, report, lines)
    codes = {error.exit_code for error in errors.values()}
    order = (ExitCode.INTEGRITY, ExitCode.NETWORK, ExitCode.MISSING_OFFLINE)
    return next((code for code in order if code in codes), ExitCode.BUG if codes else ExitCode.OK)


_WHOLE_ERRORS = 5


class _Progress:
    """One line on a terminal, nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.live = sys.stderr.isatty()
        self._lock = threading.Lock()

    def __call__(self, artifact: Artifact) -> None:
        with self._lock:
            self.done += 1
            if self.live:
                print(f"\r{self.done}/{self.total}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.live:
            print(file=sys.stderr)
