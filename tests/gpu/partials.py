"""Partial results as a trtllm-gen kernel leaves them, made up, and what joining them must give (float64)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from cpu.core_problems import paged_problem

from fmha_dispatch import _core
from fmha_dispatch.manifest import load_manifest

D, SPARSE = _core.DataType, _core.SparseMlaType
B200 = {"sm": 100, "sm_count": 148, "max_smem_bytes": 232448, "max_cluster_size": 16}
KEYS_PER_STEP = 128
LOWEST = torch.finfo(torch.float32).min  # maximum of a row whose keys are all masked
KINDS = ("mla", "sparse", "sparse-lengths", "head-dim-512")


@dataclass
class Partials:
    """One launch of the reduction.

    Attributes:
        q_lens: query tokens of each request.
        buffers, tensors: what KernelParams point at; the tensors keep it alive.
        out: [sum_seq_lens_q, heads, head_dim_v] as bytes; all ones before the launch, and a guard behind.
        want, want_lse: float64, natural logarithm.
    """

    problem: _core.Problem
    decision: _core.Decision
    launch: dict[str, Any]
    q_lens: list[int]
    buffers: _core.Buffers
    out: torch.Tensor
    want: torch.Tensor
    want_lse: torch.Tensor
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def row(self) -> _core.Row:
        return load_manifest("trtllm-gen")[self.decision.row]


def random_problem(rng: random.Random, kind: str) -> _core.Problem:
    """One whose kernel may leave its partial results to a separate reduction."""
    batch = rng.choice([1, 2, 3, 4, 7, 8])
    q_len = rng.choice([1, 1, 2, 3, 4])
    kv_len = rng.choice([300, 700, 2000, 9000, 40_000, 131_072])
    changes: dict[str, Any] = {"has_lse": True, "has_sinks": rng.random() < 0.5, "ragged_q": rng.random() < 0.5}
    if kind == "head-dim-512":
        dtype = rng.choice([D.BF16, D.FP16, D.E4M3, D.E4M3])
        out = rng.choice([D.BF16, D.FP16, D.E4M3]) if dtype is D.E4M3 else dtype
        heads_kv, group, q_len = rng.choice([1, 2]), rng.choice([5, 8, 12, 16, 24, 64]), rng.choice([3, 4, 6, 8, 13])
        dims, page = (512, 512), rng.choice([16, 32, 64])
        changes["window_left"] = rng.choice([-1, -1, 1000])
    else:
        dtype, out = rng.choice([D.BF16, D.E4M3]), D.BF16
        heads_kv, group = 1, rng.choice([64, 128, 128])
        dims, page = (576, 512), rng.choice([32, 64])
        changes["mask"] = _core.MaskType.Dense
        if kind != "mla":
            page = 1
            changes |= {"sparse_mla": SPARSE.StaticTokenSparse, "sparse_top_k": rng.choice([512, 2048])}
        if kind == "sparse-lengths":
            dims = (512, 512)
            changes |= {"sparse_mla": SPARSE.DynamicTokenSparse, "has_sliding_window_pool": True}
    return paged_problem(
        dtype=dtype,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        heads_q=group * heads_kv,
        heads_kv=heads_kv,
        head_dim=dims[0],
        page=page,
        dtype_o=out,
        **({"head_dim_v": dims[1]} | changes),
    )


def choose(rng: random.Random, kind: str) -> tuple[_core.Problem, _core.Decision, dict[str, Any]]:
    """Problems until one needs the reduction: with its decision and the launch of the reduction on a B200."""
    manifest, gpu = load_manifest("trtllm-gen"), _core.Device(**B200)
    while True:
        problem = random_problem(rng, kind)
        decision = _core.select(problem, manifest, gpu)
        if decision.row < 0:
            continue
        launch = _core.separate_reduction(problem, manifest, decision, gpu)
        if launch is not None:
            return problem, decision, launch


def make(rng: random.Random, kind: str) -> Partials:
    """Random partial results. What the attention kernel would not write is NaN."""
    problem, decision, launch = choose(rng, kind)
    row, shape = load_manifest("trtllm-gen")[decision.row], decision.shape
    gen = torch.Generator(device="cuda").manual_seed(rng.getrandbits(32))
    batch, heads, width = problem.batch_size, problem.num_heads_q, problem.head_dim_v
    num_v, head_ctas = launch["num_head_dim_ctas_v"], launch["num_ctas_for_all_heads"]
    tile, splits, tokens_per_cta = row.tile_size_q, shape.num_ctas_kv, shape.num_tokens_per_cta_q
    heads_per_cta, sum_scale = heads // head_ctas, launch["sum_scale"]

    longest = problem.max_seq_len_q
    q_lens = [rng.randint(0, longest) if problem.ragged_q else longest for _ in range(batch)]
    q_lens[rng.randrange(batch)] = longest
    kv_lens = [rng.choice([0, 1, 5, 127, 128, 129, 300, problem.max_seq_len_kv]) for _ in range(batch)]
    kv_lens[rng.randrange(batch)] = problem.max_seq_len_kv
    tokens = [(b, t) for b in range(batch) for t in range(q_lens[b])]
    problem.sum_seq_lens_q = len(tokens)
    top_k_lens = [rng.choice([0, 1, 200, problem.sparse_top_k]) for _ in tokens]

    def written(b: int, t: int, token: int) -> int:
        """Splits of the tile of request b's token t."""
        last = min(q_lens[b], (t // tokens_per_cta + 1) * tokens_per_cta) - 1
        keys = max(0, kv_lens[b] - q_lens[b] + last + 1)
        if launch["supports_var_sparse_top_k_lens"]:
            keys = top_k_lens[token]
        elif launch["is_token_sparse"]:
            keys = min(keys, problem.sparse_top_k)
        return min(-(-keys // KEYS_PER_STEP), splits)

    # Statistics and outputs of rows as (token, head, split); then scattered to where the kernel leaves them.
    n = len(tokens)
    scale = rng.choice([0.01, 0.07, 0.3]) * math.log2(math.e)
    rows = torch.randn(n, heads, splits, generator=gen, device="cuda") * 3 / scale
    sums = (1 + 127 * torch.rand(n, heads, splits, generator=gen, device="cuda")) * sum_scale
    half = torch.bfloat16 if problem.dtype_o is D.BF16 else torch.float16
    outs = torch.randn(n, heads, splits, width, generator=gen, device="cuda")
    outs = (outs * (sums / sum_scale)[..., None]).to(half)
    masked = torch.rand(n, heads, splits, generator=gen, device="cuda") < 0.15
    masked[:, rng.randrange(heads)] = True  # a head that sees nothing at all
    rows[masked] = rng.choice([LOWEST, -math.inf])
    outs[masked] = math.nan
    exists = torch.tensor([written(b, t, i) for i, (b, t) in enumerate(tokens)], device="cuda")[:, None, None]
    exists = (torch.arange(splits, device="cuda") < exists).expand(n, heads, splits)

    stats_at = torch.full((batch, head_ctas, num_v, shape.num_ctas_q, splits, tile, 2), math.nan, device="cuda")
    outs_at = torch.full(
        (batch, head_ctas, num_v, shape.num_ctas_q, splits, tile, width // num_v), math.nan, device="cuda", dtype=half
    )
    b = torch.tensor([b for b, _ in tokens], device="cuda")[:, None]
    t = torch.tensor([t for _, t in tokens], device="cuda")[:, None]
    h = torch.arange(heads, device="cuda")[None]
    place = (b, h // heads_per_cta, slice(None), t // tokens_per_cta, slice(None))
    place = (*place, t % tokens_per_cta * heads_per_cta + h % heads_per_cta)
    pairs = torch.stack([rows, sums], -1).masked_fill(~exists[..., None], math.nan)
    stats_at[place] = pairs[:, :, None].expand(n, heads, num_v, splits, 2)
    values = outs.masked_fill(~exists[..., None], math.nan)
    outs_at[place] = values.view(n, heads, splits, num_v, width // num_v).transpose(2, 3)

    sinks = torch.randn(heads, generator=gen, device="cuda") * 3
    sinks[0], sinks[1] = 60.0, -math.inf
    want, want_lse = joined(rows, sums, outs, exists & ~masked, scale, sum_scale, sinks if problem.has_sinks else None)

    scratch = torch.full((shape.partial_stats_bytes + shape.partial_o_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
    assert stats_at.numel() * 4 <= shape.partial_stats_bytes
    scratch[: stats_at.numel() * 4] = stats_at.view(-1).view(torch.uint8)
    size = outs_at.numel() * 2
    scratch[shape.partial_stats_bytes : shape.partial_stats_bytes + size] = outs_at.view(-1).view(torch.uint8)
    item_bytes = 1 if problem.dtype_o is D.E4M3 else 2
    out = torch.full((n * heads * width * item_bytes + 4096,), 0xFF, dtype=torch.uint8, device="cuda")
    stats = torch.full((n * heads + 16, 2), math.nan, device="cuda")
    tensors = {
        "scratch": scratch,
        "o": out,
        "softmax_stats": stats,
        "seq_lens_kv": torch.tensor(kv_lens, dtype=torch.int32, device="cuda"),
        "sparse_top_k_lens": torch.tensor(top_k_lens, dtype=torch.int32, device="cuda"),
    }
    if problem.has_sinks:
        tensors["sinks"] = sinks
    if problem.ragged_q:
        ends = torch.tensor([0, *q_lens]).cumsum(0)
        tensors["cum_seq_lens_q"] = ends.to(torch.int32).cuda()
    scalars: dict[str, Any] = {"scale_softmax_log2": scale}
    if rng.random() < 0.5:
        tensors["scale_softmax_log2_ptr"] = torch.tensor([scale], device="cuda")
        scalars["scale_softmax_log2"] = 99.0
    buffers = _core.Buffers(**scalars, **{name: tensor.data_ptr() for name, tensor in tensors.items()})
    return Partials(problem, decision, launch, q_lens, buffers, out, want, want_lse, tensors)


def joined(
    rows: torch.Tensor,
    sums: torch.Tensor,
    outs: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    sum_scale: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE from maxima, sums and outputs of those splits that count; 0 and -inf where none does."""
    logits = (rows.double() * scale).masked_fill(~counts, -math.inf)
    sees = counts.any(-1)
    base = torch.where(sees, logits.amax(-1), 0.0)
    if sinks is not None:
        sink = sinks.double() * math.log2(math.e)
        base = torch.maximum(base, sink)
    weights = torch.exp2(logits - base[..., None])
    total = (weights * sums.double().masked_fill(~counts, 0)).sum(-1) / sum_scale
    if sinks is not None:
        total = total + torch.exp2(sink - base)
    joint = torch.einsum("ths,thsd->thd", weights, outs.double().masked_fill(~counts[..., None], 0))
    want = torch.where(sees[..., None], joint / total[..., None], 0.0)
    return want, torch.where(sees, base * math.log(2) + total.log(), -math.inf)
