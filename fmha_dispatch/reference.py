"""Paged decode attention in float32 with torch: the meaning of a call, written for reading, used to judge kernels."""

from __future__ import annotations

import math
from typing import Any


def decode_reference(
    query: Any,
    kv_cache: Any,
    block_tables: Any,
    seq_lens: Any,
    *,
    bmm1_scale: float | Any = 1.0,
    bmm2_scale: float | Any = 1.0,
    window_left: int = -1,
    sinks: Any = None,
    kv_layout: str = "HND",
    q_len_per_req: int | None = 1,
    cum_seq_lens_q: Any = None,
    uses_shared_paged_kv_idx: bool = True,
) -> tuple[Any, Any]:
    """Reference of `trtllm_batch_decode_with_kv_cache`, with the same keywords.

    Token t of a request with L_q query tokens and L_kv keys stands at position ``L_kv - L_q + t``; it sees the keys at
    and left of its position, ``window_left`` of them besides its own. A row that sees no key is 0 with LSE -inf.

    Returns:
        ``(out, lse)``: float32 ``[sum_seq_lens_q, num_heads_q, head_dim]`` and float32
        ``[sum_seq_lens_q, num_heads_q]`` (natural logarithm, sinks included).
    """
    import torch

    key, value = kv_cache if isinstance(kv_cache, (tuple, list)) else (kv_cache[:, 0], kv_cache[:, -1])
    if kv_layout == "NHD":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    num_heads_kv, page_size = key.shape[1:3]
    sum_seq_lens_q, num_heads_q, head_dim = query.shape
    group = num_heads_q // num_heads_kv

    kv_lens = [int(n) for n in seq_lens.reshape(-1).tolist()]
    if cum_seq_lens_q is not None:
        starts = [int(n) for n in cum_seq_lens_q.tolist()]
    else:
        assert q_len_per_req is not None  # the API has checked it
        starts = [i * q_len_per_req for i in range(len(kv_lens) + 1)]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full((sum_seq_lens_q, num_heads_q), -math.inf, dtype=torch.float32, device=query.device)
    for request, kv_len in enumerate(kv_lens):
        begin, end = starts[request], starts[request + 1]
        if begin == end or kv_len == 0:
            continue
        num_pages = -(-kv_len // page_size)
        tables = block_tables[request]
        k_pages, v_pages = (tables, tables) if uses_shared_paged_kv_idx else (tables[0], tables[1])

        def gather(cache: Any, pages: Any, count: int = num_pages, length: int = kv_len) -> Any:
            picked = cache[pages[:count].long()].float().transpose(0, 1)  # [Hkv, pages, page, d]
            return picked.reshape(num_heads_kv, count * page_size, head_dim)[:, :length]

        keys, values = gather(key, k_pages), gather(value, v_pages)
        rows = query[begin:end].float().reshape(end - begin, num_heads_kv, group, head_dim)
        logits = torch.einsum("thgd,hkd->thgk", rows, keys) * bmm1_scale

        position = torch.arange(kv_len - (end - begin), kv_len, device=query.device)[:, None]
        index = torch.arange(kv_len, device=query.device)[None, :]
        visible = index <= position
        if window_left >= 0:
            visible &= index >= position - window_left
        logits = logits.masked_fill(~visible[:, None, None, :], -math.inf)

        row_lse = torch.logsumexp(logits, dim=-1)
        if sinks is not None:
            sink = sinks.float().reshape(1, num_heads_kv, group)
            row_lse = torch.where(row_lse.isneginf(), row_lse, torch.logaddexp(row_lse, sink))
        # A key that no row may see can hold anything, NaN included: it must not meet a zero weight.
        seen = visible.any(dim=0)[None, :, None]
        values = torch.where(seen, values, torch.zeros_like(values))
        weights = torch.exp(logits - row_lse[..., None]).nan_to_num(0.0)
        attended = torch.einsum("thgk,hkd->thgd", weights, values) * bmm2_scale
        out[begin:end] = attended.reshape(end - begin, num_heads_q, head_dim)
        lse[begin:end] = row_lse.reshape(end - begin, num_heads_q)
    return out, lse
