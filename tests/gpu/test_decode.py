"""The Hopper decode family on the GPU, each output against float32: every row and head."""

from __future__ import annotations

import random

import pytest
import torch
from cases import Case, build, check, launch, replace, run

import fmha_dispatch
from fmha_dispatch import decode, loader
from fmha_dispatch.errors import NotPrepared

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
PAGES = (16, 32, 64)
GROUPS = (*range(1, 17), 32)
Q_LENS = tuple(range(1, 17))


def random_lens(rng: random.Random, batch: int, longest: int) -> tuple[int, ...]:
    """Lengths around the places where kernels break: 1, page and tile edges, and anything."""
    edges = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1024, longest)
    return tuple(min(longest, rng.choice((rng.choice(edges), rng.randint(1, longest)))) for _ in range(batch))


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_group_and_every_draft_length(dtype: torch.dtype, head_dim: int, page_size: int, workspace) -> None:
    rng = random.Random(f"{dtype}{head_dim}{page_size}")
    cells = [(group, rng.choice(Q_LENS)) for group in GROUPS] + [(rng.choice(GROUPS), q_len) for q_len in Q_LENS]
    for seed, (group, q_len) in enumerate(cells):
        run(
            Case(
                kv_lens=random_lens(rng, rng.choice((1, 3, 8)), rng.choice((300, 3000))),
                q_lens=q_len,
                num_heads_kv=rng.choice((1, 2, 8)),
                group=group,
                head_dim=head_dim,
                page_size=page_size,
                dtype=dtype,
                kv_layout=rng.choice(("HND", "NHD")),
                window_left=rng.choice((-1, -1, 0, 1, 63, 64, 200, 5000)),
                sinks=rng.random() < 0.3,
                lse=rng.random() < 0.7,
                shared_tables=rng.random() < 0.8,
                tensor_scales=rng.random() < 0.3,
                enable_pdl=rng.choice((None, True, False)),
                seed=seed,
            ),
            workspace,
        )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_positions_seen_exactly(dtype: torch.dtype, head_dim: int, workspace) -> None:
    """Zero Q and K make every visible key count the same; one-hot V shows which were seen (T3.29)."""
    for page_size in PAGES:
        for kv_len in (1, 16, 17, 63, 64, 65, head_dim, head_dim + 1, 4095, 4096, 4097):
            for q_len, group, window_left in ((1, 8, -1), (4, 12, -1), (4, 5, 63), (8, 8, 17), (16, 1, 0), (7, 16, -1)):
                case = Case(
                    kv_lens=(kv_len, max(kv_len - 3, 0)),
                    q_lens=q_len,
                    group=group,
                    head_dim=head_dim,
                    page_size=page_size,
                    dtype=dtype,
                    window_left=window_left,
                    exact=True,
                )
                run(case, workspace)


def test_split_kv_modes_agree_with_the_reference(workspace) -> None:
    """From one CTA a request to many: no split, cluster reduction, global-memory reduction."""
    for batch in (1, 2, 7, 40, 64, 132):
        for q_len in (1, 4, 8):
            for model in ((8, 12, 128), (8, 8, 64), (1, 8, 256)):
                heads, group, dim = model
                run(
                    Case((2048,) * (batch - 1) + (5000,), q_len, heads, group, dim, 64, seed=batch),
                    workspace,
                )


def test_T3_08_requests_of_very_different_length(workspace) -> None:
    lens = (1, 64, 65, 2048, 1, 8192, 513, 4096)
    case = Case(lens, 4, num_heads_kv=2, group=8)
    inputs = build(case)
    together, lse = launch(case, inputs, workspace)
    check(case, together, lse, inputs)


def test_T3_09_padded_slots(workspace) -> None:
    """seq_len 0 gives zeros and LSE -inf and leaves the other rows alone."""
    for longest in (16, 4096, 131072):
        for q_len in (1, 4):
            lens = (5, 3, 9, 1, 2, 0, 0, 0)
            case = Case(lens, q_len)
            inputs = build(case)
            out, lse = launch(replace(case, kv_lens=(*lens[:-1], longest)), inputs, workspace)
            check(case, out, lse, inputs)
            assert (out[5 * q_len :] == 0).all() and lse[5 * q_len :].isneginf().all()


def test_T3_14_fewer_keys_than_drafts(workspace) -> None:
    for sinks in (False, True):
        run(Case((0, 1, 2, 3, 4, 5), 4, sinks=sinks), workspace)


def test_T5_02_window_of_each_draft_row(workspace) -> None:
    for kv_len in (*range(63, 71), 1000):
        run(Case((kv_len,), 4, window_left=63), workspace)
        run(Case((kv_len,), 4, window_left=63, exact=True), workspace)


def test_T3_28_one_row_one_head(workspace) -> None:
    for kv_len in range(1016, 1101, 3):
        for q_len, window_left in ((8, 1023), (8, -1), (1, 1023)):
            run(Case((kv_len,), q_len, num_heads_kv=4, group=2, head_dim=256, window_left=window_left), workspace)


def test_ragged_drafts(workspace) -> None:
    """cum_seq_lens_q: requests without drafts write nothing; offsets stay right."""
    rng = random.Random(7)
    for head_dim in HEAD_DIMS:
        for q_lens in ((4, 0, 1, 3), (0, 0, 0, 1), (1, 16, 0, 7), (2,) * 4):
            for group in (1, 5, 8, 16, 32):
                kv_lens = tuple(max(n, q) for n, q in zip(random_lens(rng, 4, 900), q_lens, strict=True))
                run(Case(kv_lens, q_lens, group=group, head_dim=head_dim, sinks=group == 8), workspace)


@pytest.mark.parametrize("tail", (2**30, 2**31 - 1, -1))
def test_T3_11_ids_beyond_the_live_range(tail: int, workspace) -> None:
    case = Case((17, 33, 1), 1)
    inputs = build(case)
    inputs.block_tables[inputs.block_tables == 2**30] = tail
    out, lse = launch(case, inputs, workspace)
    check(case, out, lse, inputs)


def test_T3_15_query_is_a_slice_of_packed_qkv(workspace) -> None:
    case = Case((100, 200, 300, 400), 1, num_heads_kv=8, group=4)
    inputs = build(case)
    packed = torch.randn(4, 6144, device="cuda").to(case.dtype)
    packed[:, :4096] = inputs.query.reshape(4, -1)
    inputs.query = packed[:, :4096].unflatten(1, (32, 128))
    out, lse = launch(case, inputs, workspace, out=torch.full((4, 32, 128), 777.0, device="cuda", dtype=case.dtype))
    check(case, out, lse, inputs)


def test_T3_16_one_kv_head_with_an_odd_stride(workspace) -> None:
    case = Case((100, 37), 2, num_heads_kv=1)
    inputs = build(case)
    key, value = inputs.kv_cache
    for stride in (0, 1, 7, 2**40):
        odd = [t.as_strided(t.shape, (t.stride(0), stride, t.stride(2), 1)) for t in (key, value)]
        out, lse = launch(case, replace_cache(inputs, odd), workspace)
        check(case, out, lse, inputs)


def test_T3_20_layer_of_a_cross_layer_pool(workspace) -> None:
    for kv_layout in ("HND", "NHD"):
        case = Case((100, 300), 3, kv_layout=kv_layout)
        inputs = build(case)
        pool = torch.full(
            (inputs.kv_cache[0].shape[0], 2, 5, *inputs.kv_cache[0].shape[1:]), float("nan"), device="cuda"
        )
        pool = pool.to(case.dtype)
        for index, cache in enumerate(inputs.kv_cache):
            pool[:, index, 3] = cache
        out, lse = launch(case, replace_cache(inputs, [pool[:, 0, 3], pool[:, 1, 3]]), workspace)
        check(case, out, lse, inputs)
        stacked = pool[:, :, 3]  # one rank-5 tensor
        out, lse = launch(case, replace_cache(inputs, stacked), workspace)
        check(case, out, lse, inputs)


def test_T3_19_page_offsets_past_32_bits(workspace) -> None:
    """A pool whose byte and element offsets pass 2^32; a wrapped index would land on poisoned pages."""
    heads, page, dim = 8, 64, 128
    num_pages = 2**32 // (heads * page * dim) + 500  # elements, so 2x in bytes
    key = torch.empty(num_pages, heads, page, dim, dtype=torch.bfloat16, device="cuda")
    value = torch.empty_like(key)
    case = Case((page * 3,), 1, heads, 4, dim, page)
    inputs = build(case)
    ids = torch.tensor([num_pages - 1, num_pages - 200, num_pages - 77], device="cuda")
    for pool, cache in zip((key, value), inputs.kv_cache, strict=True):
        pool[:1000] = float("nan")
        pool[ids] = cache[inputs.block_tables[0, :3].long()]
    inputs.block_tables[0, :3] = ids.int()
    out, lse = launch(case, replace_cache(inputs, [key, value]), workspace)
    check(case, out, lse, replace_cache(inputs, [key, value]))


def test_sliced_block_table_keeps_its_pitch(workspace) -> None:
    case = Case((100, 40, 70), 2)
    inputs = build(case)
    wide = torch.full((3, 64), 2**30, dtype=torch.int32, device="cuda")
    wide[:, : inputs.block_tables.shape[1]] = inputs.block_tables
    inputs.block_tables = wide[:, :8]
    out, lse = launch(case, inputs, workspace)
    check(case, out, lse, inputs)


def test_same_call_gives_the_same_bits(workspace) -> None:
    """T3.01: dirty scratch, counters back at zero: 50 rounds of changing shapes, each bit-equal to its first."""
    cases = [Case((n,) * b, 2, group=8, seed=n) for b in (1, 7, 64) for n in (1, 300, 9000)]
    first = []
    for case in cases:
        inputs = build(case)
        first.append((inputs, launch(case, inputs, workspace)))
    for _ in range(50):
        for case, (inputs, (out, lse)) in zip(cases, first, strict=True):
            workspace.fill_(0xFF)
            again, again_lse = launch(case, inputs, workspace)
            assert torch.equal(out, again) and torch.equal(lse, again_lse)


def test_T4_03_two_streams(workspace) -> None:
    """Interleaved launches on two streams with a workspace each do not disturb one another."""
    jobs = []
    for seed in (1, 2):
        case = Case((3000,) * 3, 4, group=8, seed=seed)
        inputs = build(case)
        out, _ = launch(case, inputs, workspace)
        jobs.append((case, inputs, out.clone(), torch.cuda.Stream(), torch.empty_like(workspace)))
    torch.cuda.synchronize()
    results = []
    for _ in range(200):
        for case, inputs, expected, stream, own in jobs:
            with torch.cuda.stream(stream):
                results.append((expected, launch(case, inputs, own)[0]))
    torch.cuda.synchronize()
    assert all(torch.equal(expected, got) for expected, got in results)


def test_graph_replays_with_other_lengths(workspace) -> None:
    case = Case((4000, 4000, 4000), 2, group=8)
    inputs = build(case)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out, lse = launch(case, inputs, workspace)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch_into(case, inputs, workspace, out, lse)
        for lens in ((4000, 1, 17), (0, 3999, 64), (65, 0, 0)):
            inputs.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
            out.fill_(777.0)
            graph.replay()
            stream.synchronize()
            check(replace(case, kv_lens=lens), out, lse, inputs)


def test_T4_04_first_use_under_capture_leaves_the_capture_valid(workspace, monkeypatch) -> None:
    monkeypatch.setattr(loader, "_loaded", {})  # as in a process that has not loaded any kernel
    case = Case((50,), 1, group=7, head_dim=256, dtype=torch.float16)
    inputs = build(case)
    decode.forget_plans()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    marker = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph, stream=stream):
        marker.add_(1)
        with pytest.raises(NotPrepared):
            launch(case, inputs, workspace)
    graph.replay()
    torch.cuda.synchronize()
    assert marker.item() == 1


def replace_cache(inputs, cache):
    return type(inputs)(inputs.query, cache, inputs.block_tables, inputs.seq_lens, inputs.keywords)


def launch_into(case, inputs, workspace, out, lse) -> None:
    fmha_dispatch.trtllm_batch_decode_with_kv_cache(
        inputs.query,
        inputs.kv_cache,
        workspace,
        inputs.block_tables,
        inputs.seq_lens,
        max(case.kv_lens),
        out=out,
        lse=lse,
        **inputs.keywords,
    )
