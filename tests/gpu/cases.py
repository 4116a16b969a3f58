"""Decode calls for the GPU tests: inputs whose unused parts are poisoned, and the check against the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import fmha_dispatch
from fmha_dispatch.reference import decode_reference

DEVICE = "cuda"
WILD_PAGE = 2**30
# Relative norm over the whole output, and over the worst (row, head).
LIMITS = {torch.bfloat16: (5e-3, 1.5e-2), torch.float16: (1e-3, 4e-3)}
LSE_LIMIT = 2e-3


@dataclass(frozen=True)
class Case:
    """One call. kv_lens may hold zeros; q_lens is one length for all requests, or one for each (ragged)."""

    kv_lens: tuple[int, ...]
    q_lens: int | tuple[int, ...] = 1
    num_heads_kv: int = 2
    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_layout: str = "HND"
    window_left: int = -1
    sinks: bool = False
    lse: bool = True
    shared_tables: bool = True
    tensor_scales: bool = False
    enable_pdl: bool | None = None
    exact: bool = False  # zero Q and K, V one-hot in its position
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    def query_lengths(self) -> list[int]:
        return [self.q_lens] * self.batch if isinstance(self.q_lens, int) else list(self.q_lens)


@dataclass
class Inputs:
    """Tensors of a case, and the keywords of the call."""

    query: Any
    kv_cache: Any
    block_tables: Any
    seq_lens: Any
    keywords: dict[str, Any] = field(default_factory=dict)


def build(case: Case) -> Inputs:
    """Random (or exact) inputs; NaN in every slot that no request may read, wild ids in the tails of the tables."""
    gen = torch.Generator(device=DEVICE).manual_seed(case.seed)
    heads, page, dim = case.num_heads_kv, case.page_size, case.head_dim
    pages_of = [-(-n // page) for n in case.kv_lens]
    tables = 1 if case.shared_tables else 2
    live = sum(pages_of) * tables
    num_pages = live + 3
    shape = (num_pages, heads, page, dim) if case.kv_layout == "HND" else (num_pages, page, heads, dim)
    key = torch.randn(shape, device=DEVICE, generator=gen).to(case.dtype)
    value = torch.randn(shape, device=DEVICE, generator=gen).to(case.dtype)
    if case.exact:
        key.zero_()

    width = max([*pages_of, 1]) + 2
    block_tables = torch.full((case.batch, tables, width), WILD_PAGE, dtype=torch.int32)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(case.seed)).int()
    used = 0
    unread_k = torch.ones(num_pages, page, dtype=torch.bool)
    unread_v = torch.ones(num_pages, page, dtype=torch.bool)
    one_hot = torch.zeros(num_pages, page, dim) if case.exact else None
    for request, count in enumerate(pages_of):
        for table in range(tables):
            ids = order[used : used + count]
            used += count
            block_tables[request, table, :count] = ids
            slots = torch.arange(count * page).reshape(count, page)
            dead = slots >= case.kv_lens[request]
            if case.window_left >= 0:  # keys left of the first draft row's window
                dead |= slots < case.kv_lens[request] - case.query_lengths()[request] - case.window_left
            if table == 0:
                unread_k[ids.long()] = dead
            if table == tables - 1:
                unread_v[ids.long()] = dead
                if one_hot is not None:
                    one_hot[ids.long()] = torch.nn.functional.one_hot(slots % dim, dim).float()
    hnd_value = value if case.kv_layout == "HND" else value.transpose(1, 2)
    hnd_key = key if case.kv_layout == "HND" else key.transpose(1, 2)
    if one_hot is not None:
        hnd_value.copy_(one_hot.to(DEVICE)[:, None].expand_as(hnd_value))
    hnd_key.masked_fill_(unread_k.to(DEVICE)[:, None, :, None], math.nan)
    hnd_value.masked_fill_(unread_v.to(DEVICE)[:, None, :, None], math.nan)

    q_lens = case.query_lengths()
    rows = sum(q_lens)
    query = torch.randn(rows, heads * case.group, dim, device=DEVICE, generator=gen).to(case.dtype)
    if case.exact:
        query.zero_()
    scale = 1 / math.sqrt(dim)
    keywords: dict[str, Any] = {
        "bmm1_scale": scale,
        "bmm2_scale": 0.75,
        "window_left": case.window_left,
        "kv_layout": case.kv_layout,
        "uses_shared_paged_kv_idx": case.shared_tables,
    }
    if case.tensor_scales:
        keywords["bmm1_scale"] = torch.tensor([scale], device=DEVICE)
        keywords["bmm2_scale"] = torch.tensor([0.75], device=DEVICE)
    if case.sinks:
        keywords["sinks"] = torch.randn(heads * case.group, device=DEVICE, generator=gen)
    if isinstance(case.q_lens, int):
        keywords["q_len_per_req"] = case.q_lens
    else:
        keywords["q_len_per_req"] = None
        keywords["cum_seq_lens_q"] = torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).int()
    return Inputs(
        query,
        (key, value),
        (block_tables[:, 0] if case.shared_tables else block_tables).contiguous().to(DEVICE),
        torch.tensor(case.kv_lens, dtype=torch.int32, device=DEVICE),
        keywords,
    )


def launch(case: Case, inputs: Inputs, workspace: Any, out: Any = None) -> tuple[Any, Any]:
    """Runs our kernel; out and lse start as sentinels so that an unwritten element shows."""
    rows, heads, _ = inputs.query.shape
    if out is None:
        out = torch.full_like(inputs.query, 777.0)
    lse = torch.full((rows, heads), 777.0, device=DEVICE) if case.lse else None
    extra: dict[str, Any] = {"enable_pdl": case.enable_pdl}
    if not isinstance(case.q_lens, int):
        extra["max_q_len"] = max(case.q_lens)
    result = fmha_dispatch.trtllm_batch_decode_with_kv_cache(
        inputs.query,
        inputs.kv_cache,
        workspace,
        inputs.block_tables,
        inputs.seq_lens,
        max(case.kv_lens),
        out=out,
        lse=lse,
        **inputs.keywords,
        **extra,
    )
    assert result is out
    return out, lse


def check(case: Case, out: Any, lse: Any, inputs: Inputs) -> None:
    """Every row and head against the float32 reference."""
    expected, expected_lse = decode_reference(
        inputs.query, inputs.kv_cache, inputs.block_tables, inputs.seq_lens, **inputs.keywords
    )
    got = out.float()
    assert torch.isfinite(got).all(), f"non-finite output in {case}"
    blind = expected_lse.isneginf()
    assert (got[blind] == 0).all(), f"rows that see no key are not zero in {case}"
    overall, worst = LIMITS[case.dtype]
    error = (got - expected).norm() / expected.norm().clamp_min(1e-20)
    assert error <= overall, f"relative norm {error:.2e} > {overall} in {case}"
    row_error = (got - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-20)
    row_error = torch.where(blind, 0.0, row_error)
    assert row_error.max() <= worst, (
        f"row {divmod(int(row_error.argmax()), row_error.shape[1])}: {row_error.max():.2e} in {case}"
    )
    if lse is not None:
        assert torch.equal(lse.isneginf(), blind), f"LSE -inf elsewhere than expected in {case}"
        difference = (lse - expected_lse)[~blind].abs()
        assert difference.numel() == 0 or difference.max() <= LSE_LIMIT, f"LSE off by {difference.max():.2e} in {case}"


def run(case: Case, workspace: Any) -> Any:
    """Build, launch, check; returns out."""
    inputs = build(case)
    out, lse = launch(case, inputs, workspace)
    check(case, out, lse, inputs)
    return out


__all__ = ["Case", "Inputs", "build", "check", "launch", "replace", "run"]
