"""fmha_dispatch: prebuilt fused-attention kernels, found, verified, selected and launched.

Importing this package reads no environment, opens no file but its own modules, and imports neither torch, requests
nor CUDA. Public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "dense_decode_problem": "problem",
    "describe": "device",
    "prepare": "plan",
    "supports": "plan",
    "trtllm_batch_decode_with_kv_cache": "decode",
    "workspace_bound": "plan",
    "workspace_bytes": "plan",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
