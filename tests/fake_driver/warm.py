"""A tiny cubin, a hopper manifest and a plan of it: what is needed to launch on the fake driver."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

from cpu.hopper_rows import hopper_rows

from fmha_dispatch import _core, loader
from fmha_dispatch.cubin import VerifiedCubin
from fmha_dispatch.device import describe, driver, open_device

# Device addresses that no test reads through.
BUFFERS: dict[str, Any] = {
    "q": 0x7F00_0000_0000,
    "k": 0x7F10_0000_0000,
    "v": 0x7F20_0000_0000,
    "o": 0x7F30_0000_0000,
    "seq_lens": 0x7F40_0000_0000,
    "cum_seq_lens_q": 0,
    "block_tables": 0x7F50_0000_0000,
    "sinks": 0,
    "lse": 0,
    "scratch": 0x7F60_0000_0000,
    "scratch_bytes": 1 << 30,
    "bmm1_scale": 0.125,
    "bmm1_scale_log2_ptr": 0,
    "bmm2_scale": 1.0,
    "bmm2_scale_ptr": 0,
    "enable_pdl": True,
    "stream": 0,
}


def tiny_cubin(symbol: str = "sm90a_decode_bf16_d128_q8", *, salt: bytes = b"", **changes: Any) -> VerifiedCubin:
    """Bytes that are an ELF as far as the fake looks: they say their length and hold the symbol's name."""
    body = symbol.encode() + b"\0" + salt
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 40, 64 + len(body))  # e_shoff: no section headers follow
    data = bytes(header) + body
    fields: dict[str, Any] = {
        "name": f"hopper/{symbol}.cubin",
        "symbol": symbol,
        "data": data,
        "sha256": hashlib.sha256(data).hexdigest(),
        "arch": "sm_90a",
        "param_bytes": _core.KERNEL_PARAMS_BYTES,
    }
    return VerifiedCubin(**(fields | changes))


def problem(**changes: Any) -> _core.Problem:
    """Batch 8, 64/8 heads of 128, 8,192 keys in pages of 16, bf16; one query token a request."""
    batch, heads_q, heads_kv, dim, page, q_len = (
        changes.pop(name, default)
        for name, default in (
            ("batch", 8),
            ("heads_q", 64),
            ("heads_kv", 8),
            ("dim", 128),
            ("page", 16),
            ("q_len", 1),
        )
    )
    pages = 8192 // page
    fields: dict[str, Any] = {
        "dtype_q": _core.DataType.BF16,
        "dtype_k": _core.DataType.BF16,
        "dtype_v": _core.DataType.BF16,
        "dtype_o": _core.DataType.BF16,
        "batch_size": batch,
        "max_seq_len_q": q_len,
        "max_seq_len_kv": 8192,
        "sum_seq_lens_q": batch * q_len,
        "num_heads_q": heads_q,
        "num_heads_kv": heads_kv,
        "head_dim_qk": dim,
        "head_dim_v": dim,
        "page_size": page,
        "num_pages_k": batch * pages,
        "num_pages_v": batch * pages,
        "max_pages_per_seq": pages,
        "stride_q_token": heads_q * dim,
        "stride_q_head": dim,
    }
    for side in ("k", "v"):
        fields[f"stride_{side}_token"] = dim
        fields[f"stride_{side}_head"] = page * dim
        fields[f"stride_{side}_page"] = heads_kv * page * dim
    return _core.Problem(**(fields | changes))


@dataclass
class Warm:
    """A launcher on one device and what it was made of."""

    launcher: _core.Launcher
    kernel: loader.LoadedKernel
    row: _core.Row
    shape: _core.Shape
    problem: _core.Problem
    manifest: _core.Manifest
    decision: _core.Decision

    def launch(self, **changes: Any) -> None:
        self.launcher.launch(**(BUFFERS | changes))


def warm(device: int = 0, *, mode: str | None = None, **changes: Any) -> Warm:
    """Selects, loads and plans `problem(**changes)`.

    Args:
        mode: only rows with this way of reducing a split are in the manifest.
    """
    rows = [row for row in hopper_rows() if mode is None or row["multi_ctas_kv_mode"] == mode]
    manifest = _core.Manifest(_core.Manifest.pack(rows))
    asked = problem(**changes)
    decision = _core.select(asked, manifest, describe(device))
    assert decision.row >= 0, decision.reason
    row = manifest[decision.row]
    kernel = loader.load(tiny_cubin(row.symbol), device)
    launcher = _core.Launcher(
        driver(), asked, manifest, decision, kernel.function, device, open_device(device).context, row.name
    )
    return Warm(launcher, kernel, row, decision.shape, asked, manifest, decision)
