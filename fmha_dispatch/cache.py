"""The user's cache: objects named by digest, published whole or not at all, shared by all versions and processes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from fmha_dispatch.errors import StoreError
from fmha_dispatch.lockfile import Artifact
from fmha_dispatch.settings import LIMITS, Limits
from fmha_dispatch.sources import file_size, read_file

_log = logging.getLogger("fmha_dispatch")


class Cache:
    """``objects/ab/<sha256>``, with ``tmp``, ``locks`` and ``quarantine`` beside. Nothing is created before a write.

    Objects are immutable: a reader holds bytes of its own, a writer renames a finished file into place, so that no
    lock is needed for correctness. Locks only keep processes from fetching the same bytes twice.
    """

    kind = "cache"

    def __init__(self, root: Path, limits: Limits = LIMITS) -> None:
        self.root = root
        self.limits = limits
        self.name = f"cache {root}"

    def object_path(self, artifact: Artifact) -> Path:
        """Where its bytes lie, if they do."""
        return self.root / "objects" / artifact.sha256[:2] / artifact.sha256

    def size(self, artifact: Artifact) -> int | None:
        return file_size(self.object_path(artifact))

    def read(self, artifact: Artifact) -> bytes | None:
        return read_file(self.object_path(artifact), artifact.size, follow_links=False)

    def put(self, artifact: Artifact, data: bytes) -> None:
        """Publishes verified bytes.

        Raises:
            StoreError: the disk refused; nothing partial is visible and no temporary file stays.
        """
        publish(self.object_path(artifact), data, self.root / "tmp")

    def quarantine(self, artifact: Artifact) -> Path | None:
        """Moves a damaged object aside, so that the next fetch can replace it; None if it cannot be moved."""
        target = self.root / "quarantine" / f"{artifact.sha256}.{secrets.token_hex(4)}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.object_path(artifact), target)
        except OSError:
            return None
        return target

    @contextlib.contextmanager
    def lock(self, artifact: Artifact) -> Iterator[None]:
        """Waits while another process fetches the same object; goes on without the lock when it cannot be had."""
        import filelock

        path = self.root / "locks" / f"{artifact.sha256}.lock"
        deadline = time.monotonic() + self.limits.lock_wait_s
        patience = 10.0
        with contextlib.ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                lock = filelock.FileLock(path)
                while True:
                    left = deadline - time.monotonic()
                    try:
                        stack.enter_context(lock.acquire(timeout=max(0.0, min(patience, left))))
                        break
                    except filelock.Timeout:
                        if left <= patience:
                            _log.warning("%s: fetching without the lock %s, still held elsewhere", artifact.path, path)
                            break
                        _log.warning("%s: waiting for another process that holds %s", artifact.path, path)
                        patience = 30.0
            except (OSError, NotImplementedError) as error:
                _log.debug("no lock for %s: %s", artifact.path, error)
            yield

    def sweep(self) -> int:
        """Removes temporary files that a killed process left; how many."""
        removed = 0
        with contextlib.suppress(OSError), os.scandir(self.root / "tmp") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if self._is_stale(entry):
                        os.unlink(entry.path)
                        removed += 1
        return removed

    def _is_stale(self, entry: os.DirEntry[str]) -> bool:
        host, _, rest = entry.name.partition("+")
        pid = rest.partition("+")[0]
        if host != _host() or not pid.isdigit():
            # Another machine's process cannot be asked whether it lives: a day without a write is enough.
            return time.time() - entry.stat(follow_symlinks=False).st_mtime > 24 * self.limits.stale_temp_s
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False


def publish(path: Path, data: bytes, temp: Path) -> None:
    """Writes `data` to a file of folder `temp`, syncs it, and renames it to `path`, replacing what is there.

    Raises:
        StoreError: with the bytes needed and free when the disk is full.
    """
    name = temp / f"{_host()}+{os.getpid()}+{secrets.token_hex(8)}"
    try:
        temp.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StoreError(
            f"cannot write: {error.strerror or error}",
            asked=path,
            found=_free(temp, len(data)) if error.errno in (errno.ENOSPC, errno.EDQUOT) else None,
            fix="choose a writable folder with FMHA_DISPATCH_CACHE_DIR",
        ) from error


def _free(folder: Path, need: int) -> str:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        status = os.statvfs(folder)
    except OSError:
        return f"{need} bytes needed"
    return f"{need} bytes needed, {status.f_bavail * status.f_frsize} free"


def _host() -> str:
    return socket.gethostname().replace("/", "_").replace("+", "_")[:64]
