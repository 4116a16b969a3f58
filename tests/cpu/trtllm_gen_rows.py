"""NVIDIA's kernels as manifest rows, from the golden metadata."""

from __future__ import annotations

from typing import Any

from fmha_dispatch import _core

COLUMNS = {
    "funcName": "symbol",
    "dtypeQ": "dtype_q",
    "dtypeK": "dtype_k",
    "dtypeV": "dtype_v",
    "dtypeO": "dtype_o",
    "sm": "sm",
    "tileSizeQ": "tile_size_q",
    "tileSizeKv": "tile_size_kv",
    "stepQ": "step_q",
    "stepKv": "step_kv",
    "headDimPerCtaV": "head_dim_per_cta_v",
    "headDimQk": "head_dim_qk",
    "headDimV": "head_dim_v",
    "numTokensPerPage": "num_tokens_per_page",
    "threadsPerCta": "threads",
    "smemBytes": "smem_bytes",
    "sageQ": "sage_q",
    "sageK": "sage_k",
    "sageP": "sage_p",
    "sageV": "sage_v",
    "groupsHeadsQ": "groups_heads_q",
    "groupsTokensHeadsQ": "groups_tokens_heads_q",
    "dynamicPage": "dynamic_page",
    "reuseSmemKForV": "reuse_smem_k_for_v",
    "uses2CtaMma": "uses_2cta_mma",
    "skipsSoftmax": "skips_softmax",
}
ENUMS = {
    "qkvLayout": ("layout", _core.QkvLayout),
    "maskType": ("mask", _core.MaskType),
    "kernelType": ("kernel_type", _core.KernelType),
    "tileScheduler": ("scheduler", _core.TileScheduler),
    "multiCtasKvMode": ("multi_ctas_kv_mode", _core.MultiCtasKvMode),
    "sparseAttn": ("sparse_mla", _core.SparseMlaType),
}


def trtllm_gen_row(meta: dict[str, Any]) -> dict[str, Any]:
    """One line of ``kernel_meta.jsonl`` by column."""
    row = {column: meta[name] for name, column in COLUMNS.items()}
    row |= {column: enum(meta[name]) for name, (column, enum) in ENUMS.items()}
    return row | {"name": meta["funcName"], "cubin": meta["funcName"] + ".cubin"}
