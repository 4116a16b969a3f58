"""Problems for the core's tests: one ordinary decode call, to be varied."""

from __future__ import annotations

from typing import Any

from fmha_dispatch import _core

INT64_MAX = 2**63 - 1


def paged_problem(
    *,
    dtype: Any = _core.DataType.BF16,
    batch: int = 8,
    q_len: int = 1,
    kv_len: int = 8192,
    heads_q: int = 96,
    heads_kv: int = 8,
    head_dim: int = 128,
    page: int = 16,
    **changes: Any,
) -> _core.Problem:
    """A decode call over a dense HND cache; `changes` set fields of Problem directly."""
    pages_per_seq = -(-max(kv_len, 1) // page)
    pages = max(batch * pages_per_seq, 1)
    fields: dict[str, Any] = {
        "dtype_q": dtype,
        "dtype_k": dtype,
        "dtype_v": dtype,
        "dtype_o": dtype,
        "batch_size": batch,
        "max_seq_len_q": q_len,
        "max_seq_len_kv": kv_len,
        "sum_seq_lens_q": batch * q_len,
        "num_heads_q": heads_q,
        "num_heads_kv": heads_kv,
        "head_dim_qk": head_dim,
        "head_dim_v": head_dim,
        "page_size": page,
        "num_pages_k": pages,
        "num_pages_v": pages,
        "max_pages_per_seq": pages_per_seq,
        "stride_q_token": heads_q * head_dim,
        "stride_q_head": head_dim,
    }
    for tensor in "kv":
        fields |= {
            f"stride_{tensor}_token": head_dim,
            f"stride_{tensor}_head": page * head_dim,
            f"stride_{tensor}_page": heads_kv * page * head_dim,
        }
    return _core.Problem(**(fields | changes))
