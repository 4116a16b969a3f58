"""A hopper manifest as tools/build_cubins.py describes it, without compiling anything."""

from __future__ import annotations

from typing import Any

HEAD_DIMS = (64, 128, 256)
TILES_Q = (8, 16, 32, 64, 128)
MODES = {"Disabled": "", "GmemReduction": "_gmem", "CgaSmemReduction": "_cga"}
H200 = {"sm": 90, "sm_count": 132, "max_smem_bytes": 232448}


def hopper_row(dtype: str, head_dim: int, tile_q: int, mode: str) -> dict[str, Any]:
    """One row; `dtype` is BF16 or FP16."""
    symbol = f"sm90a_decode_{dtype.lower()}_d{head_dim}_q{tile_q}"
    return {
        "name": symbol + MODES[mode],
        "cubin": f"hopper/{symbol}.cubin",
        "symbol": symbol,
        "dtype_q": dtype,
        "dtype_k": dtype,
        "dtype_v": dtype,
        "dtype_o": dtype,
        "layout": "PagedKv",
        "mask": "SlidingOrChunkedCausal",
        "kernel_type": "SwapsMmaAbForGeneration" if tile_q <= 32 else "KeepsMmaAbForGeneration",
        "scheduler": "Static",
        "multi_ctas_kv_mode": mode,
        "sm": 90,
        "tile_size_q": tile_q,
        "tile_size_kv": 64,
        "step_q": tile_q,
        "step_kv": 64,
        "head_dim_per_cta_v": head_dim,
        "head_dim_qk": head_dim,
        "head_dim_v": head_dim,
        "num_tokens_per_page": 16,
        "dynamic_page": True,
        "smem_bytes": 200_000,
        "threads": 256,
        "groups_heads_q": True,
        "groups_tokens_heads_q": True,
    }


def hopper_rows() -> list[dict[str, Any]]:
    """All rows of the family."""
    return [
        hopper_row(dtype, head_dim, tile_q, mode)
        for dtype in ("BF16", "FP16")
        for head_dim in HEAD_DIMS
        for tile_q in TILES_Q
        for mode in MODES
    ]
