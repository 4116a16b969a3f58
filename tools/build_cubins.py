#!/usr/bin/env python3
"""Compiles csrc/kernels into cubins; writes the embedded packs, the packed manifest, the families in cubins.lock.

Other families of the lock (NVIDIA's cubins, see make_lock.py) stay as they are.

Digests do not depend on the folder or the time: nvcc runs in the source root with relative paths, and the pack has
fixed timestamps and sorted names. Only nvcc of one exact version is accepted, from the PyPI packages that the extra
``cubins`` names or from PATH.

    tools/build_cubins.py                       build all, write packs, manifest and lock
    tools/build_cubins.py --only 'd128_q64'     build some, keep the rest of the packs
    tools/build_cubins.py --check               build all, compare digests with cubins.lock, write nothing
    tools/build_cubins.py --check --changed REF --sample 2 --seed S    what changed since REF and a moving sample
    tools/build_cubins.py --only lse --arch sm_90a --out FOLDER    for a test on another GPU: nothing else is written

Exit codes: 0 ok, 1 user (no such variant, wrong nvcc), 2 bug (does not compile, spills), 4 digests differ.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cubin_variants import FAMILIES, BuiltFamily, Variant, path_of, variants

from fmha_dispatch.cubin import read_cubin
from fmha_dispatch.lockfile import Artifact, Family, LockFile, Table, Toolchain

ROOT = Path(__file__).resolve().parent.parent
# A change here may change any cubin.
THESE = {Path("tools/build_cubins.py"), Path("tools/cubin_variants.py")}
DATA = Path("fmha_dispatch/data")
LOCK = Path("cubins.lock")
LAYOUT = "0.6.13"  # of KernelParams: the FlashInfer release whose trtllm-gen layout csrc/kernel_params.h follows

NVCC_VERSION = "13.0.88"
REGISTERS_PER_SM = 65536


class Failure(Exception):
    """Ends the run with a message and an exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


# --- compiler ---------------------------------------------------------------------------------------------------------


def find_nvcc(any_version: bool = False) -> Path:
    """nvcc of the wanted version, or of any: the PyPI package of this interpreter, else PATH."""
    candidates = [Path(entry) / "nvidia/cu13/bin/nvcc" for entry in sys.path if entry]
    if (on_path := shutil.which("nvcc")) is not None:
        candidates.append(Path(on_path))
    seen = []
    for nvcc in candidates:
        if not nvcc.is_file():
            continue
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"V(\d+\.\d+\.\d+)", text)
        if found and (any_version or found[1] == NVCC_VERSION):
            return nvcc
        seen.append(f"{nvcc} is {found[1] if found else 'not nvcc'}")
    raise Failure(
        1,
        f"nvcc {NVCC_VERSION} is needed ({'; '.join(seen) or 'none found'}): "
        "install that toolkit or `pip install '.[cubins]'`",
    )


@dataclass(frozen=True)
class Built:
    """A compiled variant and what the compiler reported."""

    variant: Variant
    cubin: bytes
    registers: int

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.cubin).hexdigest()


def compile_variant(nvcc: Path, variant: Variant, folder: Path, arch: str | None = None) -> Built:
    """Runs nvcc; a warning, local memory or a kernel that cannot be resident as planned is a failure.

    Args:
        arch: in place of the family's, for a test; then local memory is no failure.
    """
    output = folder / f"{variant.symbol}.cubin"
    macros = [f"-DFMHA_{name}={value}" for name, value in {**variant.macros, "SYMBOL": variant.symbol}.items()]
    flags = variant.family.nvcc_flags(arch)
    command = [nvcc, *flags, *macros, "-Xptxas", "-v", "-o", output, variant.source.as_posix()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    log = run.stdout + run.stderr
    if run.returncode != 0 or "warning" in log:
        raise Failure(2, f"{variant.symbol}: nvcc says\n{log}")
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.search(r"Used (\d+) registers", log)
    if stack is None or used is None:
        raise Failure(2, f"{variant.symbol}: no resource report in\n{log}")
    if arch is None and any(int(n) for n in stack.groups()):
        raise Failure(2, f"{variant.symbol}: local memory in use ({stack[0]})")
    registers = int(used[1])
    if registers * variant.threads * variant.ctas_per_sm > REGISTERS_PER_SM:
        raise Failure(2, f"{variant.symbol}: {registers} registers, too many for {variant.ctas_per_sm} CTAs an SM")
    return Built(variant, output.read_bytes(), registers)


def build(nvcc: Path, chosen: list[Variant], jobs: int, arch: str | None = None) -> list[Built]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda variant: compile_variant(nvcc, variant, Path(folder), arch), chosen))


# --- outputs ----------------------------------------------------------------------------------------------------------


def write_pack(path: Path, cubins: dict[str, bytes]) -> None:
    """A ZIP whose bytes depend on nothing but the cubins."""
    with zipfile.ZipFile(path, "w") as pack:
        for name in sorted(cubins):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_STORED  # deflate's bytes differ between versions of zlib
            entry.create_system = 3
            entry.external_attr = 0o644 << 16
            pack.writestr(entry, cubins[name])


def read_pack(path: Path) -> dict[str, bytes]:
    if not path.is_file():
        return {}
    with zipfile.ZipFile(path) as pack:
        return {name: pack.read(name) for name in pack.namelist()}


# --- choice -----------------------------------------------------------------------------------------------------------


def changed_since(reference: str, table: list[Variant]) -> list[Variant]:
    """Variants with a source that differs from the git commit; all if this tool did or the commit is not there."""
    command = ["git", "diff", "--name-only", reference, "--", "csrc", *map(Path.as_posix, THESE)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:  # a shallow clone
        return table
    names = {Path(line) for line in run.stdout.split("\n") if line}
    return table if THESE & names else [variant for variant in table if names & includes(variant.source)]


def includes(source: Path) -> set[Path]:
    """The file and the files of this tree that it includes, directly or not."""
    found, todo = set(), [source]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        found.add(file)
        for name in re.findall(r'#include "([^"]+)"', (ROOT / file).read_text()):
            todo.append((ROOT / file.parent / name).resolve().relative_to(ROOT))
    return found


def choose(args: argparse.Namespace, table: list[Variant]) -> list[Variant]:
    chosen = table
    if args.only:
        chosen = [v for v in table if re.search(args.only, v.symbol)]
        if not chosen:
            raise Failure(1, f"no variant matches {args.only!r}; there are {', '.join(v.symbol for v in table)}")
    if args.changed is not None or args.sample is not None:
        picked = set(changed_since(args.changed, chosen)) if args.changed is not None else set()
        rest = [v for v in chosen if v not in picked]
        picked |= set(random.Random(args.seed).sample(rest, min(args.sample or 0, len(rest))))
        chosen = [v for v in chosen if v in picked]
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", help="variants whose symbol matches")
    parser.add_argument("--check", action="store_true", help="compare digests with cubins.lock, write nothing")
    parser.add_argument("--changed", metavar="REF", help="variants whose sources differ from this git commit")
    parser.add_argument("--sample", type=int, metavar="N", help="and N others, picked by --seed")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--arch", help="compile for this architecture instead, with any nvcc; needs --out")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the cubins of --arch go")
    parser.add_argument("--find-nvcc", action="store_true", help="print the compiler that would be used, and stop")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    args = parser.parse_args()
    if (args.arch is None) != (args.out is None) or (args.arch and args.check):
        parser.error("--arch and --out go together, without --check")
    try:
        nvcc = find_nvcc(any_version=args.arch is not None)
        if args.find_nvcc:
            print(nvcc)
            return 0
        built = build(nvcc, choose(args, variants()), args.jobs, args.arch)
        for item in built:
            v = item.variant
            facts = f"{item.registers} registers, {v.threads} threads, {v.ctas_per_sm} CTAs an SM"
            print(f"{path_of(v)} {item.sha256} {len(item.cubin)} B: {facts}")
        if args.arch is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            for item in built:
                (args.out / f"{item.variant.symbol}.cubin").write_bytes(item.cubin)
        elif args.check:
            check(built)
        else:
            write(built, keep=bool(args.only))
    except Failure as failure:
        print(f"build_cubins: {failure}", file=sys.stderr)
        return failure.code
    return 0


def toolchain_of(family: BuiltFamily) -> Toolchain:
    return Toolchain(NVCC_VERSION, tuple(family.nvcc_flags()))


def check(built: list[Built]) -> None:
    """Raises if a digest is not the lock's, or if the lock was written with another compiler or other flags."""
    lock = LockFile.read(ROOT / LOCK)
    for built_family in {item.variant.family for item in built}:
        family = lock.families.get(built_family.name)
        if family is None or family.toolchain != toolchain_of(built_family):
            found = family.toolchain if family else "none"
            raise Failure(4, f"{LOCK}: {built_family.name} was written with another toolchain: {found}")
    wrong = []
    for item in built:
        path = path_of(item.variant)
        artifact = lock.by_path.get(path)
        if artifact is None or artifact.sha256 != item.sha256:
            wrong.append(f"{path}: built {item.sha256}, locked {artifact.sha256 if artifact else 'not'}")
    if wrong:
        raise Failure(4, "\n".join(["digests differ from the lock:", *wrong]))


def artifact_of(variant: Variant, cubin: bytes) -> Artifact:
    """The lock's line, from what the ELF says."""
    family, found = variant.family, read_cubin(cubin)
    kernel = found.kernels.get(variant.symbol)
    if found.arch != family.arch or kernel is None or kernel.param_bytes != family.param_bytes or kernel.frame_bytes:
        raise Failure(2, f"{variant.symbol}: the ELF says {found.arch}, {kernel}")
    digest = hashlib.sha256(cubin).hexdigest()
    return Artifact(family.name, path_of(variant), digest, len(cubin), family.arch, family.param_bytes, variant.symbol)


def write(built: list[Built], keep: bool) -> None:
    """Packs, manifest, and our families in the lock. With `keep` the variants not built now stay as they are."""
    cubins: dict[str, bytes] = {}
    packs = {family.pack for family in FAMILIES}
    for pack in packs if keep else ():
        cubins |= read_pack(ROOT / DATA / pack)
    cubins |= {path_of(item.variant): item.cubin for item in built}
    known = [variant for variant in variants() if path_of(variant) in cubins]
    (ROOT / DATA).mkdir(exist_ok=True)
    for pack in packs:
        members = [path_of(variant) for variant in known if variant.family.pack == pack]
        write_pack(ROOT / DATA / pack, {path: cubins[path] for path in members})
    lock = LockFile.read(ROOT / LOCK) if (ROOT / LOCK).is_file() else LockFile({}, ())
    for family in FAMILIES:
        members = [variant for variant in known if variant.family is family]
        entry = Family(
            param_bytes=family.param_bytes,
            layout=LAYOUT,
            pack=family.pack,
            table=write_manifest(ROOT / DATA / family.manifest, members) if family.manifest else None,
            toolchain=toolchain_of(family),
        )
        artifacts = [artifact_of(variant, cubins[path_of(variant)]) for variant in members]
        lock = lock.replace_family(family.name, entry, artifacts)
    (ROOT / LOCK).write_text(lock.dump())


def write_manifest(path: Path, members: list[Variant]) -> Table:
    from fmha_dispatch._core import Manifest  # --check does without the extension

    table: bytes = Manifest.pack([row for variant in members for row in variant.rows()])
    path.write_bytes(table)
    return Table(path.name, hashlib.sha256(table).hexdigest(), len(table))


if __name__ == "__main__":
    sys.exit(main())
