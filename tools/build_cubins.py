#!/usr/bin/env python3
"""Compiles csrc/kernels into cubins; writes the embedded pack, the packed manifest, the family in cubins.lock.

Digests do not depend on the folder or the time: nvcc runs in the source root with relative paths, and the pack has
fixed timestamps and sorted names. Only nvcc of one exact version is accepted, from the PyPI packages that the extra
``cubins`` names or from PATH.

    tools/build_cubins.py                       build all, write pack, manifest and lock
    tools/build_cubins.py --only 'd128_q64'     build some, keep the rest of the pack
    tools/build_cubins.py --check               build all, compare digests with cubins.lock, write nothing
    tools/build_cubins.py --check --changed REF --sample 2 --seed S    what changed since REF and a moving sample

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
from typing import Any

from fmha_dispatch.cubin import read_cubin
from fmha_dispatch.lockfile import Artifact, Family, LockFile, Table, Toolchain

ROOT = Path(__file__).resolve().parent.parent
THIS = Path("tools/build_cubins.py")
KERNELS = Path("csrc/kernels")
DATA = Path("fmha_dispatch/data")
PACK = DATA / "hopper.zip"
MANIFEST = DATA / "hopper.manifest"
LOCK = Path("cubins.lock")
FAMILY = "hopper"
LAYOUT = "0.6.13"  # of KernelParams: the FlashInfer release whose trtllm-gen layout csrc/kernel_params.h follows

NVCC_VERSION = "13.0.88"
NVCC_FLAGS = ["-cubin", "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++17", "-O3"]

SMEM_PER_SM = 233472
SMEM_PER_CTA = 232448
SMEM_RESERVED = 1024  # the driver's share of each resident CTA
REGISTERS_PER_SM = 65536
PARAM_BYTES = 1280


class Failure(Exception):
    """Ends the run with a message and an exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


# --- variants ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One kernel of sm90_decode.cu; the numbers must agree with ``Config`` there (it asserts them)."""

    dtype: str
    head_dim: int
    tile_q: int

    @property
    def symbol(self) -> str:
        return f"sm90a_decode_{self.dtype}_d{self.head_dim}_q{self.tile_q}"

    @property
    def path(self) -> str:
        return f"{FAMILY}/{self.symbol}.cubin"

    @property
    def source(self) -> Path:
        return KERNELS / "sm90_decode.cu"

    @property
    def swaps(self) -> bool:
        return self.tile_q < 64

    @property
    def tile_kv(self) -> int:
        if self.head_dim == 64:
            return 64 if self.tile_q == 32 else 128  # 128 keys and 32 rows would spill with two CTAs an SM
        return 128 if self.head_dim == 128 and self.tile_q == 128 else 64

    @property
    def consumers(self) -> int:
        return 2 if self.swaps else self.tile_q // 64

    @property
    def threads(self) -> int:
        return 384 if self.tile_q == 128 else 128 * self.consumers + 32

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.head_dim <= 128 and self.tile_q <= 64 else 1

    def smem(self, slots: int) -> int:
        parts = 2 if self.swaps else 1
        size = self.tile_q * self.head_dim * 2 + slots * self.tile_kv * self.head_dim * 2
        if self.swaps:
            size += self.consumers * self.tile_q * self.tile_kv * 2  # P
            size += self.consumers * 4 * self.tile_q * 4 + self.tile_q * 8  # column maxima, key ranges
        size += parts * self.tile_q * 8 + self.tile_q * 4  # statistics, sinks
        size += (2 * slots + 1) * 8 + 4  # barriers, ticket
        return (size + 127) // 128 * 128

    @property
    def slots(self) -> int:
        """As many as fit, up to 8; swapped operands share them out to two warpgroups."""
        budget = min(SMEM_PER_CTA, SMEM_PER_SM // self.ctas_per_sm - SMEM_RESERVED)
        return max(n for n in range(4, 9, 2 if self.swaps else 1) if self.smem(n) <= budget)

    @property
    def macros(self) -> list[str]:
        values = {
            "BF16": "true" if self.dtype == "bf16" else "false",
            "HEAD_DIM": self.head_dim,
            "TILE_Q": self.tile_q,
            "TILE_KV": self.tile_kv,
            "SLOTS": self.slots,
            "SMEM_BYTES": self.smem(self.slots),
            "THREADS": self.threads,
            "CTAS_PER_SM": self.ctas_per_sm,
            "SYMBOL": self.symbol,
        }
        return [f"-DFMHA_{name}={value}" for name, value in values.items()]

    def rows(self) -> list[dict[str, Any]]:
        """Manifest rows: the kernel serves every way of splitting KV."""
        base = {
            "cubin": self.path,
            "symbol": self.symbol,
            **{f"dtype_{tensor}": self.dtype.upper() for tensor in "qkvo"},
            "layout": "PagedKv",
            "mask": "SlidingOrChunkedCausal",
            "kernel_type": "SwapsMmaAbForGeneration" if self.swaps else "KeepsMmaAbForGeneration",
            "scheduler": "Static",
            "sm": 90,
            "tile_size_q": self.tile_q,
            "step_q": self.tile_q,
            "tile_size_kv": self.tile_kv,
            "step_kv": self.tile_kv,
            "head_dim_per_cta_v": self.head_dim,
            "head_dim_qk": self.head_dim,
            "head_dim_v": self.head_dim,
            "num_tokens_per_page": 16,
            "dynamic_page": True,
            "smem_bytes": self.smem(self.slots),
            "threads": self.threads,
            "groups_heads_q": True,
            "groups_tokens_heads_q": True,
        }
        modes = {"Disabled": "", "GmemReduction": "_gmem", "CgaSmemReduction": "_cga"}
        return [{**base, "name": self.symbol + end, "multi_ctas_kv_mode": mode} for mode, end in modes.items()]


def variants() -> list[Variant]:
    """The whole family, by symbol."""
    table = [Variant(t, d, q) for t in ("bf16", "fp16") for d in (64, 128, 256) for q in (8, 16, 32, 64, 128)]
    return sorted(table, key=lambda v: v.symbol)


# --- compiler ---------------------------------------------------------------------------------------------------------


def find_nvcc() -> Path:
    """nvcc of the wanted version: the PyPI package of this interpreter, else PATH."""
    candidates = [Path(entry) / "nvidia/cu13/bin/nvcc" for entry in sys.path if entry]
    if (on_path := shutil.which("nvcc")) is not None:
        candidates.append(Path(on_path))
    seen = []
    for nvcc in candidates:
        if not nvcc.is_file():
            continue
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"V(\d+\.\d+\.\d+)", text)
        if found and found[1] == NVCC_VERSION:
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


def compile_variant(nvcc: Path, variant: Variant, folder: Path) -> Built:
    """Runs nvcc; a warning, local memory or a kernel that cannot be resident as planned is a failure."""
    output = folder / f"{variant.symbol}.cubin"
    command = [nvcc, *NVCC_FLAGS, *variant.macros, "-Xptxas", "-v", "-o", output, variant.source.as_posix()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    log = run.stdout + run.stderr
    if run.returncode != 0 or "warning" in log:
        raise Failure(2, f"{variant.symbol}: nvcc says\n{log}")
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.search(r"Used (\d+) registers", log)
    if stack is None or used is None:
        raise Failure(2, f"{variant.symbol}: no resource report in\n{log}")
    if any(int(n) for n in stack.groups()):
        raise Failure(2, f"{variant.symbol}: local memory in use ({stack[0]})")
    registers = int(used[1])
    if registers * variant.threads * variant.ctas_per_sm > REGISTERS_PER_SM:
        raise Failure(2, f"{variant.symbol}: {registers} registers, too many for {variant.ctas_per_sm} CTAs an SM")
    return Built(variant, output.read_bytes(), registers)


def build(nvcc: Path, chosen: list[Variant], jobs: int) -> list[Built]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda variant: compile_variant(nvcc, variant, Path(folder)), chosen))


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
    """Variants with a source that differs from the git commit; all if this file did or the commit is not there."""
    command = ["git", "diff", "--name-only", reference, "--", "csrc", THIS.as_posix()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode != 0:  # a shallow clone
        return table
    names = {Path(line) for line in run.stdout.split("\n") if line}
    return table if THIS in names else [variant for variant in table if names & includes(variant.source)]


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
    parser.add_argument("--find-nvcc", action="store_true", help="print the compiler that would be used, and stop")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    args = parser.parse_args()
    try:
        nvcc = find_nvcc()
        if args.find_nvcc:
            print(nvcc)
            return 0
        built = build(nvcc, choose(args, variants()), args.jobs)
        for item in built:
            v = item.variant
            facts = f"{item.registers} registers, {v.threads} threads, {v.smem(v.slots)} B shared, {v.slots} slots"
            print(f"{v.path} {item.sha256} {len(item.cubin)} B: {facts}")
        if args.check:
            check(built)
        else:
            write(built, keep=bool(args.only))
    except Failure as failure:
        print(f"build_cubins: {failure}", file=sys.stderr)
        return failure.code
    return 0


def check(built: list[Built]) -> None:
    """Raises if a digest is not the lock's, or if the lock was written with another compiler or other flags."""
    lock = LockFile.read(ROOT / LOCK)
    family = lock.families.get(FAMILY)
    if family is None or family.toolchain != Toolchain(NVCC_VERSION, tuple(NVCC_FLAGS)):
        raise Failure(4, f"{LOCK} was written with another toolchain: {family.toolchain if family else 'none'}")
    wrong = []
    for item in built:
        artifact = lock.by_path.get(item.variant.path)
        if artifact is None or artifact.sha256 != item.sha256:
            wrong.append(f"{item.variant.path}: built {item.sha256}, locked {artifact.sha256 if artifact else 'not'}")
    if wrong:
        raise Failure(4, "\n".join(["digests differ from the lock:", *wrong]))


def artifact_of(variant: Variant, cubin: bytes) -> Artifact:
    """The lock's line, from what the ELF says."""
    kernel = read_cubin(cubin).kernels.get(variant.symbol)
    if kernel is None or kernel.param_bytes != PARAM_BYTES or kernel.frame_bytes:
        raise Failure(2, f"{variant.symbol}: the ELF says {kernel}")
    digest = hashlib.sha256(cubin).hexdigest()
    return Artifact(FAMILY, variant.path, digest, len(cubin), "sm_90a", PARAM_BYTES, variant.symbol)


def write(built: list[Built], keep: bool) -> None:
    """Pack, manifest, and the family's part of the lock. With `keep` the variants not built now stay as they are."""
    from fmha_dispatch._core import Manifest  # --check does without the extension

    cubins = read_pack(ROOT / PACK) if keep else {}
    cubins |= {item.variant.path: item.cubin for item in built}
    known = [variant for variant in variants() if variant.path in cubins]
    artifacts = [artifact_of(variant, cubins[variant.path]) for variant in known]
    table = Manifest.pack([row for variant in known for row in variant.rows()])
    (ROOT / DATA).mkdir(exist_ok=True)
    write_pack(ROOT / PACK, {variant.path: cubins[variant.path] for variant in known})
    (ROOT / MANIFEST).write_bytes(table)
    family = Family(
        param_bytes=PARAM_BYTES,
        layout=LAYOUT,
        pack=PACK.name,
        table=Table(MANIFEST.name, hashlib.sha256(table).hexdigest(), len(table)),
        toolchain=Toolchain(NVCC_VERSION, tuple(NVCC_FLAGS)),
    )
    lock = LockFile.read(ROOT / LOCK) if (ROOT / LOCK).is_file() else LockFile({}, ())
    (ROOT / LOCK).write_text(lock.replace_family(FAMILY, family, artifacts).dump())


if __name__ == "__main__":
    sys.exit(main())
