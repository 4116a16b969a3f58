"""``cubins.lock``: which artifacts exist and what their bytes must be. Generated JSON, one artifact a line."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fmha_dispatch.errors import LockFileError
from fmha_dispatch.settings import LIMITS, Limits

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Artifact:
    """One cubin.

    Attributes:
        family: name of its family.
        path: relative POSIX path, ``FAMILY/...``; its identity in every layer that is laid out by name.
        sha256: digest of its bytes, lower-case hex.
        size: bytes.
        arch: ``sm_90a``, ``sm_100f``, ...
        param_bytes: size of the kernel's by-value parameters.
        symbol: name of the kernel in the cubin.
    """

    family: str
    path: str
    sha256: str
    size: int
    arch: str
    param_bytes: int
    symbol: str


@dataclass(frozen=True, slots=True)
class Table:
    """A packed manifest table under ``fmha_dispatch/data``."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The compiler that our own cubins were built with."""

    nvcc: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Package:
    """A Python package of someone else's that carries the family's cubins.

    Attributes:
        module: what one would import; it never is.
        folder: where they lie in it, each by its path without the family.
    """

    module: str
    folder: str


@dataclass(frozen=True, slots=True)
class Family:
    """What the artifacts of one family share.

    Attributes:
        param_bytes: size of ``KernelParams``.
        layout: version of the ``KernelParams`` layout.
        pack: archive under ``fmha_dispatch/data`` that holds its cubins, or None.
        repositories: base URLs below which its artifacts lie, by path without the family.
        table: its manifest, or None.
        toolchain: for cubins of our own, or None.
        package: where an installed package of another project holds the same cubins, or None.
    """

    param_bytes: int
    layout: str
    pack: str | None = None
    repositories: tuple[str, ...] = ()
    table: Table | None = None
    toolchain: Toolchain | None = None
    package: Package | None = None


@dataclass(frozen=True)
class LockFile:
    """The parsed lock. Artifacts are sorted by path; paths are unique."""

    families: dict[str, Family]
    artifacts: tuple[Artifact, ...]

    @classmethod
    def parse(cls, text: str, limits: Limits = LIMITS) -> LockFile:
        """Checks every field; nothing unknown, nothing missing.

        Raises:
            LockFileError: naming line and field.
        """
        from fmha_dispatch.lock_parser import parse

        return parse(text, limits)

    @classmethod
    def read(cls, path: Path, limits: Limits = LIMITS) -> LockFile:
        """Parses the file at `path`.

        Raises:
            LockFileError: missing, unreadable, too large or malformed.
        """
        try:
            with path.open("rb") as file:
                data = file.read(limits.lock_bytes + 1)
            text = data.decode("utf-8")
        except OSError as error:
            raise LockFileError(
                f"the lock cannot be read: {error.strerror or error}", asked=path, fix="reinstall fmha-dispatch"
            ) from error
        except UnicodeDecodeError as error:
            raise LockFileError(f"byte {error.start} is not UTF-8", asked=path) from error
        return cls.parse(text, limits)

    @functools.cached_property
    def by_path(self) -> dict[str, Artifact]:
        """Artifacts by path."""
        return {artifact.path: artifact for artifact in self.artifacts}

    def of_family(self, family: str) -> tuple[Artifact, ...]:
        """Artifacts of `family`, sorted by path."""
        return tuple(artifact for artifact in self.artifacts if artifact.family == family)

    def replace_family(self, name: str, family: Family, artifacts: Iterable[Artifact]) -> LockFile:
        """A lock in which `family` and its `artifacts` take the place of what was there under `name`."""
        others = [artifact for artifact in self.artifacts if artifact.family != name]
        merged = tuple(sorted([*others, *artifacts], key=lambda artifact: artifact.path))
        return LockFile({**self.families, name: family}, merged)

    def dump(self) -> str:
        """The canonical text: ``parse(dump())`` gives an equal lock, and equal locks give equal text."""
        families = ",\n".join(
            f"{_dumps(name)}: {_dumps(_plain(self.families[name]))}" for name in sorted(self.families)
        )
        ordered = sorted(self.artifacts, key=lambda artifact: artifact.path)
        artifacts = ",\n".join(_dumps(_plain(artifact)) for artifact in ordered)
        return f'{{\n"schema": {SCHEMA},\n"families": {{\n{families}\n}},\n"artifacts": [\n{artifacts}\n]\n}}\n'


@functools.cache
def installed_lock() -> LockFile:
    """The lock that this installation belongs to, read once.

    Raises:
        LockFileError: missing or malformed.
    """
    package = Path(__file__).resolve().parent
    # An installed package carries it; a checkout keeps it at the top.
    candidates = (package / "cubins.lock", package.parent / "cubins.lock")
    return LockFile.read(next((path for path in candidates if path.is_file()), candidates[0]))


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=True)


def _plain(value: Any) -> Any:
    """Dataclasses as JSON objects without what is absent."""
    if hasattr(value, "__dataclass_fields__"):
        named = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
        return {name: entry for name, entry in named.items() if entry is not None}
    return list(value) if isinstance(value, tuple) else value
