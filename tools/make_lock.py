#!/usr/bin/env python3
"""Writes the trtllm-gen part of cubins.lock and its packed manifest from NVIDIA's own files.

    pip download --no-deps flashinfer-cubin==VERSION
    tools/make_lock.py flashinfer_cubin-VERSION-py3-none-any.whl --layout VERSION

SOURCE is the wheel of the PyPI package flashinfer-cubin or a folder laid out like its ``cubins``: one artifact folder
``COMMIT/fmha/trtllm-gen`` with the cubins, ``checksums.txt`` and ``include/flashInferMetaInfo.h``. Every digest is
checked against both files and every cubin is read: arch, symbol and parameter size in the lock are those of the bytes.
``--layout`` names the KernelParams table of csrc/kernel_params.h that this artifact version needs.

Exit codes: 0 ok, 1 SOURCE is not usable, 4 digests or ELF facts disagree, or (--check) the committed files differ.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from metadata_header import HeaderError, Kernel, read_kernels

from fmha_dispatch import _core
from fmha_dispatch.cubin import read_cubin
from fmha_dispatch.errors import IntegrityError
from fmha_dispatch.lockfile import Artifact, Family, LockFile, Package, Table

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "cubins.lock"
MANIFEST = ROOT / "fmha_dispatch" / "data" / "trtllm_gen.manifest"

FAMILY = "trtllm-gen"
ARTIFACT_FOLDER = re.compile(r"(?:.*/)?([0-9a-f]{40}/fmha/trtllm-gen)/checksums\.txt")
HEADER = "include/flashInferMetaInfo.h"
# Where FlashInfer documents these artifacts to lie.
REPOSITORY = "https://edge.urm.nvidia.com/artifactory/sw-kernelinferencelibrary-public-generic-local"
# Architecture that a row's `sm` stands for.
ARCH_OF_SM = {100: "sm_100a", 103: "sm_103a", 10100: "sm_100f"}


class Failure(Exception):
    """Stops the tool with an exit code."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


class Source(Protocol):
    """Files by relative POSIX path."""

    def names(self) -> list[str]: ...
    def read(self, name: str) -> bytes: ...


class Folder:
    """A source that is a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        return [path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()]

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()


class Wheel:
    """A source that is a zip archive."""

    def __init__(self, path: Path) -> None:
        self.archive = zipfile.ZipFile(path)

    def names(self) -> list[str]:
        return self.archive.namelist()

    def read(self, name: str) -> bytes:
        return self.archive.read(name)


@dataclass(frozen=True)
class Imported:
    """What one artifact folder says.

    Attributes:
        folder: ``COMMIT/fmha/trtllm-gen``.
        param_bytes: of every kernel.
        rows: manifest rows in the order of NVIDIA's table.
        artifacts: for the lock, in the same order.
    """

    folder: str
    param_bytes: int
    rows: list[dict[str, Any]]
    artifacts: list[Artifact]


def open_source(path: Path) -> Source:
    if path.is_dir():
        return Folder(path)
    try:
        return Wheel(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise Failure(1, f"{path} is neither a folder nor a wheel: {error}") from None


def find_artifact(source: Source, commit: str | None) -> tuple[str, str]:
    """(prefix of its files in the source, ``COMMIT/fmha/trtllm-gen``)."""
    matches = [match for match in map(ARTIFACT_FOLDER.fullmatch, source.names()) if match]
    if commit is not None:
        matches = [match for match in matches if match[1].startswith(commit)]
    if len(matches) != 1:
        found = ", ".join(match[1] for match in matches) or "none"
        raise Failure(1, f"one folder COMMIT/fmha/trtllm-gen with checksums.txt is needed, found {found}; see --commit")
    return str(PurePosixPath(matches[0][0]).parent), matches[0][1]


def read_checksums(text: str) -> dict[str, str]:
    """Digest by file name, from lines as sha256sum writes them."""
    digests: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = re.fullmatch(r"([0-9a-f]{64})  (\S+)", line)
        if not match or match[2] in digests:
            raise Failure(1, f"checksums.txt line {number} is no new digest: {line[:100]!r}")
        digests[match[2]] = match[1]
    return digests


def import_artifact(source: Source, prefix: str, folder: str) -> Imported:
    digests = read_checksums(source.read(f"{prefix}/checksums.txt").decode("ascii"))

    def read(name: str) -> bytes:
        if name not in digests:
            raise Failure(4, f"{name} is not in checksums.txt")
        try:
            data = source.read(f"{prefix}/{name}")
        except (KeyError, FileNotFoundError):
            raise Failure(4, f"{name} is in checksums.txt but not in the source") from None
        found = hashlib.sha256(data).hexdigest()
        if found != digests[name]:
            raise Failure(4, f"{name} has sha256 {found}, checksums.txt says {digests[name]}")
        return data

    try:
        kernels = read_kernels(read(HEADER).decode("ascii"))
    except HeaderError as error:
        raise Failure(1, f"{HEADER}: {error}") from None
    listed = {name for name in digests if name.endswith(".cubin")}
    described = {f"{kernel.columns['symbol']}.cubin" for kernel in kernels}
    if listed != described or len(described) != len(kernels):
        odd = sorted(listed ^ described)[:5]
        raise Failure(
            4, f"{len(kernels)} kernels in the header, {len(listed)} cubins in checksums.txt; differing: {odd}"
        )
    artifacts = []
    for kernel in kernels:
        name = f"{kernel.columns['symbol']}.cubin"
        if kernel.sha256 != digests[name]:
            raise Failure(4, f"{name} has sha256 {kernel.sha256} in the header, {digests[name]} in checksums.txt")
        artifacts.append(inspect(kernel, read(name)))
    sizes = sorted({artifact.param_bytes for artifact in artifacts})
    if len(sizes) != 1:
        raise Failure(4, f"kernels disagree about the size of KernelParams: {sizes}")
    rows = [
        kernel.columns | {"name": artifact.symbol, "cubin": artifact.path}
        for kernel, artifact in zip(kernels, artifacts, strict=True)
    ]
    return Imported(folder, sizes[0], rows, artifacts)


def inspect(kernel: Kernel, data: bytes) -> Artifact:
    """The lock's entry for a cubin, from its bytes; raises if these are not what the header says."""
    symbol, sm = kernel.columns["symbol"], kernel.columns["sm"]
    try:
        cubin = read_cubin(data)
    except IntegrityError as error:
        raise Failure(4, f"{symbol}.cubin: {error}") from None
    if cubin.arch != ARCH_OF_SM[sm]:
        raise Failure(4, f"{symbol}.cubin is for {cubin.arch}, the header says {sm}")
    if symbol not in cubin.kernels:
        raise Failure(4, f"{symbol}.cubin holds {', '.join(cubin.kernels)}")
    return Artifact(
        family=FAMILY,
        path=f"{FAMILY}/{symbol}.cubin",
        sha256=kernel.sha256,
        size=len(data),
        arch=cubin.arch,
        param_bytes=cubin.kernels[symbol].param_bytes,
        symbol=symbol,
    )


def updated_lock(lock: LockFile, imported: Imported, layout: str, manifest: bytes) -> LockFile:
    """`lock` with this artifact version in place of the one before."""
    family = Family(
        param_bytes=imported.param_bytes,
        layout=layout,
        repositories=(f"{REPOSITORY}/{imported.folder}",),
        table=Table(file=MANIFEST.name, sha256=hashlib.sha256(manifest).hexdigest(), size=len(manifest)),
        package=Package(module="flashinfer_cubin", folder=f"cubins/{imported.folder}"),
    )
    return lock.replace_family(FAMILY, family, imported.artifacts)


def outputs(imported: Imported, layout: str) -> Iterator[tuple[Path, bytes]]:
    manifest: bytes = _core.Manifest.pack(imported.rows)
    lock = LockFile.read(LOCK) if LOCK.exists() else LockFile({}, ())
    yield MANIFEST, manifest
    yield LOCK, updated_lock(lock, imported, layout, manifest).dump().encode()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="wheel or folder")
    parser.add_argument("--layout", required=True, metavar="VERSION", help="version of the KernelParams layout")
    parser.add_argument("--commit", metavar="HEX", help="which artifact folder, if the source has several")
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    args = parser.parse_args(arguments)
    try:
        source = open_source(args.source)
        imported = import_artifact(source, *find_artifact(source, args.commit))
        print(f"{imported.folder}: {len(imported.artifacts)} kernels, KernelParams of {imported.param_bytes} bytes")
        for path, data in outputs(imported, args.layout):
            if not args.check:
                path.write_bytes(data)
            elif not path.exists() or path.read_bytes() != data:
                raise Failure(4, f"{path.relative_to(ROOT)} differs from what SOURCE gives")
            print(f"{path.relative_to(ROOT)}: {len(data)} bytes")
    except Failure as failure:
        print(f"make_lock: {failure}", file=sys.stderr)
        return failure.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
