"""Typed errors. Each says what was asked, what was found, and what fixes it; each maps to one CLI exit code."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Exit codes of the ``fmha-dispatch`` command."""

    OK = 0
    USER = 1
    BUG = 2
    MISSING_OFFLINE = 3
    INTEGRITY = 4
    NETWORK = 5
    DISK = 6
    DEVICE = 7
    LOCK = 8
    INTERRUPTED = 130


class FmhaError(Exception):
    """Root of every error this package raises.

    Args:
        message: one sentence with the fact that stopped the call.
        asked: what the caller asked for.
        found: what was found instead.
        fix: what would work, or the command that repairs it.
    """

    exit_code = ExitCode.BUG

    def __init__(self, message: str, *, asked: object = None, found: object = None, fix: str | None = None) -> None:
        self.message = message
        self.asked = asked
        self.found = found
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.message]
        if self.asked is not None:
            parts.append(f"asked: {self.asked}")
        if self.found is not None:
            parts.append(f"found: {self.found}")
        if self.fix is not None:
            parts.append(f"fix: {self.fix}")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The error as a JSON-ready object; ``kind`` is the class name."""
        fields = {"kind": type(self).__name__, "message": self.message}
        for name in ("asked", "found", "fix"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = str(value)
        return fields


class InvalidArgument(FmhaError, ValueError):
    """An argument is malformed: wrong dtype, rank, stride, device, range, or a missing companion."""

    exit_code = ExitCode.USER


class Unsupported(FmhaError, NotImplementedError):
    """A well-formed request that no kernel of the chosen family honours."""

    exit_code = ExitCode.USER


class ArtifactMissing(FmhaError):
    """Cubins named by the lock are in no layer and may not be fetched.

    Attributes:
        missing: paths of all of them.
    """

    exit_code = ExitCode.MISSING_OFFLINE

    def __init__(self, message: str, *, missing: Sequence[str] = (), **facts: Any) -> None:
        self.missing = tuple(missing)
        super().__init__(message, **facts)

    def to_json(self) -> dict[str, Any]:
        """With the list of all missing paths."""
        return {**super().to_json(), "missing": list(self.missing)}


class IntegrityError(FmhaError):
    """Bytes differ from what the lock promises (digest, size, arch, parameter size, symbol)."""

    exit_code = ExitCode.INTEGRITY


class FetchError(FmhaError):
    """The network did not deliver an artifact.

    Attributes:
        attempts: one line a request, credentials redacted.
    """

    exit_code = ExitCode.NETWORK

    def __init__(self, message: str, *, attempts: Sequence[str] = (), **facts: Any) -> None:
        self.attempts = tuple(attempts)
        super().__init__(message, **facts)

    def to_json(self) -> dict[str, Any]:
        """With every attempt."""
        return {**super().to_json(), "attempts": list(self.attempts)}


class StoreError(FmhaError):
    """The local store could not be read or written."""

    exit_code = ExitCode.DISK


class LockFileError(FmhaError):
    """``cubins.lock`` is malformed; the message names line and field."""

    exit_code = ExitCode.LOCK


class SettingError(FmhaError, ValueError):
    """An ``FMHA_DISPATCH_*`` environment variable has an unusable value."""

    exit_code = ExitCode.USER


class DeviceError(FmhaError):
    """No usable GPU or driver, or the driver refused a call."""

    exit_code = ExitCode.DEVICE


class DriverError(DeviceError):
    """A CUDA driver call failed.

    Attributes:
        code: the ``CUresult`` as an integer.
        call: name of the driver function.
    """

    def __init__(self, message: str, *, code: int, call: str, **facts: Any) -> None:
        self.code = code
        self.call = call
        super().__init__(message, **facts)


class NotPrepared(DeviceError):
    """A kernel would have to be loaded while the stream is being captured into a graph; nothing was called."""
