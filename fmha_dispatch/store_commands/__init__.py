"""Commands of ``fmha-dispatch`` about cubins on this machine, and the options that they share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from fmha_dispatch.console import path_option, silence_stdout
from fmha_dispatch.errors import InvalidArgument
from fmha_dispatch.lockfile import Artifact, LockFile, installed_lock
from fmha_dispatch.settings import check_url, redact_text
from fmha_dispatch.store import Store


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Which lock, which layers, which artifacts."""
    parser.add_argument("--lock", type=path_option, metavar="FILE", help="another cubins.lock than the installed one")
    parser.add_argument("--folder", type=path_option, metavar="DIR", help="folder of cubins that is looked at first")
    parser.add_argument("--cache-dir", type=path_option, metavar="DIR", help="instead of FMHA_DISPATCH_CACHE_DIR")
    parser.add_argument("--mirror", action="append", metavar="URL", help="instead of FMHA_DISPATCH_MIRRORS; repeatable")
    parser.add_argument("--offline", action="store_true", help="never open a connection")
    parser.add_argument("--family", action="append", metavar="NAME", help="only artifacts of this family; repeatable")
    parser.add_argument("--arch", action="append", metavar="SM", help="only this arch, like sm_90a; repeatable")
    parser.add_argument("--path", action="append", metavar="PATH", help="only this artifact; repeatable")
    parser.add_argument("--match", metavar="REGEX", help="only artifacts whose path contains a match")


def open_store(args: argparse.Namespace) -> Store:
    """The store that the options describe.

    Raises:
        LockFileError, SettingError
    """
    settings = args.settings
    if args.cache_dir is not None:
        settings = dataclasses.replace(settings, cache_dir=args.cache_dir.absolute())
    if args.mirror:
        mirrors = tuple(check_url("--mirror", url, position) for position, url in enumerate(args.mirror, 1))
        settings = dataclasses.replace(settings, mirrors=mirrors)
    lock = installed_lock() if args.lock is None else LockFile.read(args.lock)
    folder = None if args.folder is None else args.folder.absolute()
    return Store(lock, settings, folder=folder, network=not args.offline)


def chosen(args: argparse.Namespace, lock: LockFile) -> list[Artifact]:
    """The artifacts that the options name.

    Raises:
        InvalidArgument: none, or a family, arch or path that the lock does not have.
    """
    known = {
        "family": set(lock.families),
        "arch": {artifact.arch for artifact in lock.artifacts},
        "path": set(lock.by_path),
    }
    for name, values in known.items():
        for value in getattr(args, name) or []:
            if value not in values:
                some = sorted(values) if len(values) <= 20 else f"{len(values)} others"
                raise InvalidArgument(f"the lock has no such {name}", asked=redact_text(value), found=some)
    try:
        pattern = re.compile(args.match or "")
    except re.error as error:
        raise InvalidArgument(f"--match is no regular expression: {error}", asked=redact_text(args.match)) from None
    artifacts = [
        artifact
        for artifact in lock.artifacts
        if all(not (wanted := getattr(args, name)) or getattr(artifact, name) in wanted for name in known)
        and pattern.search(artifact.path)
    ]
    if not artifacts and lock.artifacts:
        raise InvalidArgument("no artifact matches", found=f"{len(lock.artifacts)} artifacts in the lock")
    return artifacts


def emit(args: argparse.Namespace, report: dict[str, Any], lines: Iterable[str]) -> None:
    """Prints the report as JSON or as lines. A reader that goes away early changes no exit code."""
    try:
        if args.json:
            print(json.dumps(report, indent=2))
        else:
            for line in lines:
                print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
