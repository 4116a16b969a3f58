"""The kernels that follow trtllm-gen kernels, built for this GPU from the same sources, on made-up partial results.

NVIDIA's kernels before them need a Blackwell GPU; what they leave is described in csrc/kernels/trtllm_gen_reduction.cu.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from partials import KINDS, D, Partials, choose, make

from fmha_dispatch import _core, loader
from fmha_dispatch.cubin import VerifiedCubin, read_cubin
from fmha_dispatch.device import bindings, call
from fmha_dispatch.manifest import load_manifest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CASES = 40  # of each kind
FOLLOWERS = "sm100f"  # in the symbols of all of them, also in a build for another GPU

Launch = Callable[..., None]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """launch(symbol, grid, block, arguments as bytes, pdl): on the current stream."""
    folder = tmp_path_factory.mktemp("followers")
    command = [sys.executable, ROOT / "tools/build_cubins.py", "--only", FOLLOWERS, "-j", "8"]
    subprocess.run([*command, "--arch", "sm_90a", "--out", folder], check=True)
    torch.zeros(1, device="cuda")
    functions = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        cubin = read_cubin(data)
        size = cubin.kernels[path.stem].param_bytes
        digest = hashlib.sha256(data).hexdigest()
        verified = VerifiedCubin(path.name, path.stem, data, digest, cubin.arch, size)
        functions[path.stem] = loader.load(verified, 0, param_bytes=size).function

    def run(symbol: str, grid: list[int], block: int, arguments: list[bytes], pdl: bool) -> None:
        cuda = bindings()
        values = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = int(pdl)
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = [attribute], 1
        function = cuda.CUfunction(functions[symbol])
        call("cuLaunchKernelEx", config, function, ctypes.addressof(pointers), 0, doing=symbol)

    return run


def launch_reduction(launch: Launch, case: Partials, pdl: bool) -> None:
    r = case.launch
    params = _core.fill(case.problem, load_manifest("trtllm-gen"), case.decision, case.buffers)
    flags = ("is_token_sparse", "groups_tokens_heads_q", "supports_var_sparse_top_k_lens")
    sizes = ("num_ctas_for_reduction", "num_ctas_for_all_heads", "head_dim_v", "num_head_dim_ctas_v", "tile_size_q")
    scalars = [struct.pack("<?", r[name]) for name in flags] + [struct.pack("<i", r[name]) for name in sizes]
    scalars.append(struct.pack("<f", r["sum_scale"]))
    symbol = f"{FOLLOWERS}_reduction_{case.problem.dtype_o.name.lower()}"
    launch(symbol, r["grid"], r["block"], [params, *scalars], pdl)


def launch_lse(launch: Launch, case: Partials, lse: torch.Tensor, pdl: bool) -> None:
    """lse: [tokens, heads], any strides."""
    values, blocks, threads = _core.lse_launch(case.problem)
    arguments = [
        struct.pack("<Q", case.buffers.softmax_stats),
        struct.pack("<Q", lse.data_ptr()),
        struct.pack("<i", case.problem.num_heads_q),
        struct.pack("<q", lse.stride(0)),
        struct.pack("<q", lse.stride(1)),
        struct.pack("<i", values),
    ]
    launch(f"{FOLLOWERS}_lse", [blocks, 1, 1], threads, arguments, pdl)


def decoded(case: Partials) -> tuple[torch.Tensor, torch.Tensor]:
    """Output as float64 and the largest error that its format allows for each value."""
    want, shape = case.want, case.want.shape
    dtype, ulp, smallest = {
        D.BF16: (torch.bfloat16, 2**-8, 0.0),
        D.FP16: (torch.float16, 2**-11, 2**-25),
        D.E4M3: (torch.float8_e4m3fn, 2**-4, 2**-10),
    }[case.problem.dtype_o]
    out = case.out[: want.numel() * dtype.itemsize].view(dtype).view(shape).double()
    return out, want.abs() * ulp + smallest


def check(case: Partials, lse: torch.Tensor) -> float:
    """Largest error as a part of what the output's format allows."""
    out, bound = decoded(case)
    assert (case.out[-4096:] == 0xFF).all(), "written behind the output"
    assert torch.isfinite(out).all()
    # float32 accumulation and exp2f, relative to the row's size.
    slack = 4e-6 * case.want.abs().amax(-1, keepdim=True) + 1e-6 * bound
    error = (out - case.want).abs()
    allowed = bound * 1.001 + slack
    ratio = float((error / allowed.clamp_min(1e-30)).max())
    assert (error <= allowed).all(), f"{ratio} times what is allowed"
    assert (torch.isneginf(lse) == torch.isneginf(case.want_lse)).all()
    seen = torch.isfinite(case.want_lse)
    assert ((lse.double() - case.want_lse).abs()[seen] <= 2e-5 * case.want_lse.abs()[seen].clamp_min(1)).all()
    stats = case.tensors["softmax_stats"]
    assert stats[-16:].isnan().all() and not stats[:-16].isnan().any()
    return ratio


@pytest.mark.parametrize("kind", KINDS)
def test_partial_results_are_joined(launch: Launch, kind: str) -> None:
    worst = 0.0
    for seed in range(CASES):
        rng = random.Random(f"{kind} {seed}")
        case = make(rng, kind)
        n, heads = case.want_lse.shape
        strides = rng.choice([(heads, 1), (1, n), (2 * heads + 3, 2)])
        room = torch.full((n * (2 * heads + 3),), math.nan, device="cuda")
        lse = torch.as_strided(room, (n, heads), strides)
        pdl = rng.random() < 0.5
        launch_reduction(launch, case, pdl)
        launch_lse(launch, case, lse, pdl)
        torch.cuda.synchronize()
        about = (seed, case.row.name, case.launch, case.q_lens)
        try:
            worst = max(worst, check(case, lse))
            assert int(room.isnan().sum()) == room.numel() - lse.numel(), "written beside the LSE"
        except AssertionError as error:
            raise AssertionError(f"{about}: {error}") from None
    print(f"{kind}: worst error {worst:.3f} of what rounding allows")


def test_all_shapes_were_seen() -> None:
    """Of tile, columns and output that any row of NVIDIA's table has, and that the cases above join."""
    seen: dict[str, set[Any]] = {"dtype_o": set(), "tile": set(), "columns": set(), "flags": set()}
    for kind in KINDS:
        for seed in range(CASES):
            problem, decision, r = choose(random.Random(f"{kind} {seed}"), kind)
            row = load_manifest("trtllm-gen")[decision.row]
            seen["dtype_o"].add(row.dtype_o.name)
            seen["tile"].add(row.tile_size_q)
            seen["columns"].add(problem.head_dim_v // r["num_head_dim_ctas_v"])
            seen["flags"].add((r["is_token_sparse"], r["groups_tokens_heads_q"], r["supports_var_sparse_top_k_lens"]))
    assert seen["dtype_o"] == {"BF16", "FP16", "E4M3"}
    assert seen["tile"] == {64, 128}
    assert seen["columns"] == {128, 256, 512}
    assert seen["flags"] == {(False, False, False), (True, False, False), (True, False, True), (False, True, False)}


def test_results_do_not_depend_on_the_run(launch: Launch) -> None:
    case = make(random.Random("again"), "mla")
    launch_reduction(launch, case, pdl=True)
    torch.cuda.synchronize()
    first = case.out.clone()
    for _ in range(20):
        case.out.fill_(0xFF)
        launch_reduction(launch, case, pdl=True)
        assert torch.equal(case.out, first)


def test_a_nan_of_the_attention_kernel_is_passed_on(launch: Launch) -> None:
    case = make(random.Random("nan 4"), "mla")
    stats = case.tensors["scratch"].view(torch.float32)[: 2 * case.row.tile_size_q]
    stats[0] = math.nan  # head 0 of the first token, in the first split
    launch_reduction(launch, case, pdl=False)
    torch.cuda.synchronize()
    out = case.out[: case.want.numel() * 2].view(torch.bfloat16).view(case.want.shape)
    columns = case.problem.head_dim_v // case.launch["num_head_dim_ctas_v"]  # of the CTA whose statistics these are
    assert case.q_lens[0] and case.tensors["seq_lens_kv"][0] >= case.q_lens[0], "choose another seed"
    assert out[0, 0, :columns].isnan().all()
    assert torch.isfinite(out[:, 1:]).all()
