"""Cubins, locks and stores made up by tests: no compiler, no installed package data."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

from fmha_dispatch.lockfile import Artifact, Family, LockFile
from fmha_dispatch.settings import Limits, Settings
from fmha_dispatch.store import Store

PARAM_BYTES = 1280


def make_cubin(
    symbol: str = "kernel",
    *,
    arch: str = "sm_90a",
    param_bytes: int = PARAM_BYTES,
    code: bytes = b"",
    more_attributes: int = 0,
    more_symbols: int = 0,
) -> bytes:
    """The smallest ELF that is a sound cubin with one kernel; `code` makes it unique."""
    number = int("".join(filter(str.isdigit, arch)))
    code = (code or b"\0" * 16).ljust(-(-max(len(code), 16) // 16) * 16, b"\0")
    info = (
        struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 0, 0, param_bytes << 18)
        + struct.pack("<BBH", 3, 0x19, param_bytes)
        + struct.pack("<BBHIHH", 4, 0x0A, 8, 1, 0x210, param_bytes)
    )
    common = struct.pack("<BBHII", 4, 0x2F, 8, 1, 32) + struct.pack("<BBHII", 4, 0x11, 8, 1, 0)
    common += struct.pack("<BBH", 1, 0x7F, 0) * more_attributes
    strings = b"\0" + symbol.encode() + b"\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0x10, 7, 0, len(code)) + bytes(24) * more_symbols
    compat = struct.pack("<BBH", 2, 0x09, int(arch.endswith("a")))
    note = b"ptxas\0-arch " + arch.encode() + b" -m 64 \0"
    # name, type, body, link, info, entry size
    sections: list[tuple[str, int, bytes, int, int, int]] = [
        ("", 0, b"", 0, 0, 0),
        (".shstrtab", 3, b"", 0, 0, 0),
        (".strtab", 3, strings, 0, 0, 0),
        (".symtab", 2, symbols, 2, 1, 24),
        (".nv.info", 0x70000000, common, 3, 0, 0),
        (".nv.compat", 0x70000086, compat, 0, 0, 0),
        (f".nv.info.{symbol}", 0x70000000, info, 3, 7, 0),
        (f".text.{symbol}", 1, code, 3, 0, 0),
        (f".nv.constant0.{symbol}", 1, bytes(0x210 + param_bytes), 0, 7, 0),
        (".note.nv.tkinfo", 7, note, 0, 0, 0),
    ]
    names = b"".join(section[0].encode() + b"\0" for section in sections)
    sections[1] = (".shstrtab", 3, names, 0, 0, 0)
    body, headers, offset, name = b"", b"", 64, 0
    for title, kind, data, link, extra, entry_bytes in sections:
        headers += struct.pack(
            "<IIQQQQIIQQ", name, kind, 0, 0, offset if kind else 0, len(data), link, extra, 1, entry_bytes
        )
        name += len(title) + 1
        body += data
        offset += len(data)
    header = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, offset, 0x6000004 | number << 8, 64, 56, 0, 64, 10, 1)
    return header + body + headers


def artifact_of(path: str, data: bytes, symbol: str = "kernel", arch: str = "sm_90a") -> Artifact:
    """The lock's entry for `data`."""
    return Artifact(
        path.partition("/")[0], path, hashlib.sha256(data).hexdigest(), len(data), arch, PARAM_BYTES, symbol
    )


def make_cubins(count: int, family: str = "remote", size: int = 0) -> dict[str, bytes]:
    """Path -> bytes of distinct sound cubins."""
    return {
        f"{family}/k{index:04}.cubin": make_cubin(code=index.to_bytes(4, "little").ljust(max(size, 16), b"\1"))
        for index in range(count)
    }


# What the mirrors of tests/cpu hold: large enough to be cut in the middle.
REMOTE = make_cubins(3, size=20_000)


def make_lock(cubins: dict[str, bytes], **family: object) -> LockFile:
    """A lock of `cubins`, every family with the same fields."""
    artifacts = sorted((artifact_of(path, data) for path, data in cubins.items()), key=lambda artifact: artifact.path)
    names = {artifact.family for artifact in artifacts}
    return LockFile({name: Family(PARAM_BYTES, "1", **family) for name in names}, tuple(artifacts))  # type: ignore[arg-type]


FAST = Limits(backoff_s=0.01, retry_after_s=0.5, read_s=2.0, connect_s=2.0, try_s=5.0, total_s=10.0)


def make_store(
    lock: LockFile,
    root: Path,
    *,
    mirrors: Iterable[str] = (),
    limits: Limits = FAST,
    folder: Path | None = None,
    **settings: object,
) -> Store:
    """A store with its cache and (empty) package data below `root`."""
    base = Settings(cache_dir=root / "cache", mirrors=tuple(mirrors), limits=limits)
    return Store(lock, dataclasses.replace(base, **settings), folder=folder, data=root / "data")  # type: ignore[arg-type]


def write_folder(root: Path, cubins: dict[str, bytes]) -> Path:
    """`cubins` as files below `root`."""
    for path, data in cubins.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def write_pack(path: Path, cubins: dict[str, bytes]) -> Path:
    """`cubins` as entries of a ZIP archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in cubins.items():
            archive.writestr(name, data)
    return path


def files_below(root: Path) -> list[str]:
    """Relative paths of the files in a tree."""
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
