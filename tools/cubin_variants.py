"""What tools/build_cubins.py builds: every cubin of ours with its macros, and the families that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

KERNELS = Path("csrc/kernels")

SMEM_PER_SM = 233472
SMEM_PER_CTA = 232448
SMEM_RESERVED = 1024  # the driver's share of each resident CTA
KERNEL_PARAMS_BYTES = 1280


@dataclass(frozen=True)
class BuiltFamily:
    """What the cubins of one family of the lock share.

    Attributes:
        name: in the lock; the first part of their paths.
        arch: architecture they are compiled for.
        param_bytes: size of a kernel's parameters.
        pack: archive in fmha_dispatch/data that they are shipped in; families may share one.
        manifest: table of rows that the selector reads, or None.
    """

    name: str
    arch: str
    param_bytes: int
    pack: str
    manifest: str | None = None

    def nvcc_flags(self, arch: str | None = None) -> list[str]:
        """Flags of every compilation, for `arch` in place of the family's own."""
        number = (arch or self.arch).removeprefix("sm_")
        return ["-cubin", "-gencode", f"arch=compute_{number},code=sm_{number}", "-std=c++17", "-O3"]


HOPPER = BuiltFamily("hopper", "sm_90a", KERNEL_PARAMS_BYTES, "hopper.zip", "hopper.manifest")
# These follow NVIDIA's kernels, which are built for sm_100f where not for one GPU alone: sm_100f runs on sm_100 and
# sm_103, and nothing in them would gain from more.
REDUCTION = BuiltFamily("trtllm-gen-reduction", "sm_100f", KERNEL_PARAMS_BYTES + 28, "trtllm_gen.zip")
LSE = BuiltFamily("trtllm-gen-lse", "sm_100f", 44, "trtllm_gen.zip")
FAMILIES = (HOPPER, REDUCTION, LSE)


class Variant(Protocol):
    """One cubin with one kernel."""

    @property
    def family(self) -> BuiltFamily: ...
    @property
    def symbol(self) -> str: ...
    @property
    def source(self) -> Path: ...
    @property
    def macros(self) -> dict[str, str | int]: ...
    @property
    def threads(self) -> int: ...
    @property
    def ctas_per_sm(self) -> int: ...
    def rows(self) -> Sequence[dict[str, Any]]: ...


def path_of(variant: Variant) -> str:
    """Artifact path in the lock and in the pack."""
    return f"{variant.family.name}/{variant.symbol}.cubin"


@dataclass(frozen=True)
class Decode:
    """One kernel of sm90_decode.cu; the numbers must agree with ``Config`` there (it asserts them)."""

    dtype: str
    head_dim: int
    tile_q: int

    @property
    def symbol(self) -> str:
        return f"sm90a_decode_{self.dtype}_d{self.head_dim}_q{self.tile_q}"

    @property
    def family(self) -> BuiltFamily:
        return HOPPER

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
    def macros(self) -> dict[str, str | int]:
        return {
            "BF16": "true" if self.dtype == "bf16" else "false",
            "HEAD_DIM": self.head_dim,
            "TILE_Q": self.tile_q,
            "TILE_KV": self.tile_kv,
            "SLOTS": self.slots,
            "SMEM_BYTES": self.smem(self.slots),
            "THREADS": self.threads,
            "CTAS_PER_SM": self.ctas_per_sm,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Manifest rows: the kernel serves every way of splitting KV."""
        base = {
            "cubin": path_of(self),
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


@dataclass(frozen=True)
class Reduction:
    """trtllm_gen_reduction.cu; the output dtype decides that of the partial results too."""

    output: str
    threads = 512
    ctas_per_sm = 2
    source = KERNELS / "trtllm_gen_reduction.cu"
    family = REDUCTION

    @property
    def symbol(self) -> str:
        return f"sm100f_reduction_{self.output}"

    @property
    def macros(self) -> dict[str, str | int]:
        return {"OUTPUT": f"k{self.output.capitalize()}"}

    def rows(self) -> list[dict[str, Any]]:
        return []


@dataclass(frozen=True)
class Lse:
    """trtllm_gen_lse.cu."""

    symbol = "sm100f_lse"
    threads = 1024
    ctas_per_sm = 2
    source = KERNELS / "trtllm_gen_lse.cu"
    family = LSE

    @property
    def macros(self) -> dict[str, str | int]:
        return {}

    def rows(self) -> list[dict[str, Any]]:
        return []


def variants() -> list[Variant]:
    """All cubins, by symbol."""
    table: list[Variant] = [Lse()]
    table += [Reduction(output) for output in ("bf16", "fp16", "e4m3")]
    table += [Decode(t, d, q) for t in ("bf16", "fp16") for d in (64, 128, 256) for q in (8, 16, 32, 64, 128)]
    return sorted(table, key=lambda v: v.symbol)
