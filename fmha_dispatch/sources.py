"""Read-only places where cubins may lie: folders laid out by artifact path, and packs inside the package."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from fmha_dispatch.errors import IntegrityError, StoreError
from fmha_dispatch.lockfile import Artifact, LockFile

DATA = Path(__file__).resolve().parent / "data"


class Source(Protocol):
    """One layer of the store.

    Attributes:
        kind: folder, pack, package, cache or mirror.
        name: tells a person which one.
    """

    kind: str
    name: str

    def size(self, artifact: Artifact) -> int | None:
        """Bytes of what lies here under the artifact's name, unread and unverified; None: nothing.

        Raises:
            StoreError, IntegrityError: as `read`, as far as a look at names tells.
        """
        ...

    def read(self, artifact: Artifact) -> bytes | None:
        """The bytes found for `artifact`, not yet verified and never more than its size and one; None: not here.

        Raises:
            StoreError: something is there but cannot be read.
            IntegrityError: the container is damaged.
        """
        ...


class Folder:
    """Artifacts as files below a folder: what ``fmha-dispatch fetch --dest`` writes, or a mounted mirror."""

    def __init__(self, root: Path, kind: str = "folder") -> None:
        self.root = root
        self.kind = kind
        self.name = f"{kind} {root}"

    def size(self, artifact: Artifact) -> int | None:
        return file_size(self.root / artifact.path)

    def read(self, artifact: Artifact) -> bytes | None:
        return read_file(self.root / artifact.path, artifact.size)


class Pack:
    """A ZIP archive inside the package, entries named by artifact path. It is only ever read."""

    kind = "pack"

    def __init__(self, path: Path, *families: str) -> None:
        self.path = path
        self.families = families
        self.name = f"pack {path.name}"

    def size(self, artifact: Artifact) -> int | None:
        return self._sizes.get(artifact.path) if self._may_hold(artifact) else None

    def read(self, artifact: Artifact) -> bytes | None:
        if not self._may_hold(artifact):
            return None
        with self._opened(artifact.path) as archive:
            try:
                entry = archive.getinfo(artifact.path)
            except KeyError:
                return None
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile(f"compression method {entry.compress_type}")
            with archive.open(entry) as file:
                return file.read(artifact.size + 1)

    def _may_hold(self, artifact: Artifact) -> bool:
        return artifact.family in self.families and self.path.is_file()

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        with self._opened(self.path) as archive:
            return {entry.filename: entry.file_size for entry in archive.infolist()}

    @contextlib.contextmanager
    def _opened(self, asked: object) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except OSError as error:
            raise StoreError(f"{self.name} cannot be read: {error.strerror or error}", asked=asked) from error
        # zipfile and zlib report damage in many ways; whatever they raise, these bytes are not the artifact's.
        except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, RuntimeError) as error:
            raise IntegrityError(
                f"{self.name} is damaged: {error}", asked=asked, fix="reinstall fmha-dispatch"
            ) from error


def packs(lock: LockFile, data: Path = DATA) -> list[Pack]:
    """The packs of this installation. Families may share one."""
    families: dict[str, list[str]] = {}
    for name, family in sorted(lock.families.items()):
        if family.pack:
            families.setdefault(family.pack, []).append(name)
    return [Pack(data / pack, *names) for pack, names in families.items()]


def file_size(path: Path) -> int | None:
    """Size of a regular file, None if there is none that this process may see."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def read_file(path: Path, size: int, *, follow_links: bool = True) -> bytes | None:
    """At most `size` and one bytes of a regular file; None if there is no such file.

    Raises:
        StoreError: it is there but cannot be read, or is no regular file.
    """
    # O_NONBLOCK: opening a FIFO must not wait for its writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StoreError(f"cannot read: {error.strerror or error}", asked=path) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise StoreError("not a regular file", asked=path)
        # One buffer of the expected size: what is hashed later is what was read here, whatever happens to the file.
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(size + 1)
    except OSError as error:
        raise StoreError(f"cannot read: {error.strerror or error}", asked=path) from error
    finally:
        os.close(descriptor)
