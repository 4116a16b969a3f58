"""The kernels behind a trtllm-gen kernel: what is launched, with which arguments, for recorded calls."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any

import golden
import pytest
from fake_tensor import FakeTensor

from fake_driver.driver import FakeDriver, Launch
from fake_driver.warm import BUFFERS, problem, tiny_cubin, warm
from fmha_dispatch import _core, loader, store
from fmha_dispatch import plan as plan_module
from fmha_dispatch.cubin import VerifiedCubin, read_cubin
from fmha_dispatch.device import driver, open_device
from fmha_dispatch.errors import DriverError, IntegrityError, InvalidArgument
from fmha_dispatch.manifest import load_manifest
from fmha_dispatch.plan import Choice
from fmha_dispatch.recorded_call import RecordedCall, read_call
from fmha_dispatch.replay import replay
from fmha_dispatch.tensors import view

PARAMS = _core.KERNEL_PARAMS_BYTES
PTR_PARTIAL_STATS, PTR_SOFTMAX_STATS, PTR_SCALE_SOFTMAX_LOG2 = 1016, 1096, 1056
PDL = 6
REDUCTION_SCALARS = struct.Struct("<???iiiiif")
LSE_ARGUMENTS = struct.Struct("<QQiqqi")


@pytest.fixture(scope="module")
def manifest() -> _core.Manifest:
    return load_manifest("trtllm-gen")


@pytest.fixture
def blackwell(fake: FakeDriver) -> FakeDriver:
    fake.set_device(0, sm=100, sm_count=148)
    for artifact in store.default_store().lock.artifacts:
        if artifact.family in ("trtllm-gen-reduction", "trtllm-gen-lse"):
            kernel = read_cubin(store.find(artifact.path).data).kernels[artifact.symbol]
            fake.set_parameters(artifact.symbol, kernel.params)
    return fake


def recorded(*, reduction: bool | None = None, lse: bool | None = None) -> Iterator[dict[str, Any]]:
    """Recorded decode calls whose tensors `Launcher.launch` has arguments for: no block scales, no second pool."""
    for item in golden.dispatch():
        call, expect = item["problem"], item["expect"]
        if expect["status"] != "ok" or call["fn"] != "trtllm_paged_attention_decode":
            continue
        if call["args"]["key_cache"]["dtype"] == "uint8":
            continue
        if reduction in (None, expect["reduction"] is not None) and lse in (None, expect["lse_kernel"] is not None):
            yield item


class Plan:
    """A recorded call with its kernels loaded on the fake: NVIDIA's as a stand-in, ours as shipped."""

    def __init__(self, call: RecordedCall, manifest: _core.Manifest) -> None:
        self.problem, self.gpu, self.manifest = call.problem, call.device, manifest
        self.decision = _core.select(call.problem, manifest, call.device)
        assert self.decision.row >= 0, self.decision.reason
        self.row = manifest[self.decision.row]
        self.kernel = loader.load(tiny_cubin(self.row.symbol, arch="sm_100f"), 0)
        self.behind = {}
        reduction, lse = _core.followers(call.problem, manifest, self.decision)
        if reduction is not None:
            size = _core.REDUCTION_PARAM_BYTES
            self.behind["reduction"] = loader.load(store.find(reduction), 0, param_bytes=size).function
        if lse is not None:
            self.behind["lse"] = loader.load(store.find(lse), 0, param_bytes=_core.LSE_PARAM_BYTES).function
        self.scratch_bytes = Choice("trtllm-gen", manifest, self.decision).workspace_bytes

    def launcher(self, **behind: int) -> _core.Launcher:
        context = open_device(0).context
        arguments = (driver(), self.problem, self.manifest, self.decision, self.kernel.function, 0, context, "kernel")
        return _core.Launcher(*arguments, gpu=self.gpu, **behind)

    def launch(self, **changes: Any) -> None:
        given = {"lse": 0x7F80_0000_0000, "scratch_bytes": self.scratch_bytes} | changes
        if self.problem.ragged_q:
            given.setdefault("cum_seq_lens_q", 0x5000)
        self.launcher(**self.behind).launch(**(BUFFERS | given))


def check_common(launch: Launch, expect: dict[str, Any], function: int, pdl: int, stream: int) -> None:
    assert launch.function == function
    assert list(launch.grid) == expect["grid"]
    assert list(launch.block) == expect["block"]
    assert launch.smem == expect["smem"] == 0
    assert launch.attributes == {PDL: (pdl, 0, 0)}
    assert [attribute["id"] for attribute in expect["attrs"]] == [PDL]
    assert launch.stream == stream


def test_recorded_reductions_are_launched_behind_their_kernel(blackwell: FakeDriver, manifest: _core.Manifest) -> None:
    seen = set()
    for item in itertools.islice(recorded(reduction=True), 40):
        call = read_call(item["problem"])
        expect = item["expect"]["reduction"]
        plan = Plan(call, manifest)
        stream = blackwell.new_stream()
        blackwell.clear()
        plan.launch(stream=stream, enable_pdl=call.enable_pdl, bmm1_scale_log2_ptr=0x4000)
        attention, reduction = blackwell.launches[:2]
        assert attention.function == plan.kernel.function
        check_common(reduction, expect, plan.behind["reduction"], int(call.enable_pdl), stream)
        # The same KernelParams, a scale on the device included, and behind them the scalars.
        assert len(attention.params) == PARAMS and reduction.params[:PARAMS] == attention.params
        assert reduction.pointer(PTR_SCALE_SOFTMAX_LOG2) == 0x4000
        row = plan.row
        assert REDUCTION_SCALARS.unpack(reduction.params[PARAMS:]) == (
            bool(expect["isTokenSparse"]),
            bool(expect["groupsTokensHeadsQ"]),
            bool(expect["supportsVarSparseMlaTopKLens"]),
            expect["numCtasForReduction"],
            expect["numCtasForAllHeads"],
            expect["headDimV"],
            expect["numHeadDimCtasV"],
            row.tile_size_q,
            448.0 if row.dtype_q is _core.DataType.E4M3 else 1.0,
        )
        assert len(blackwell.launches) == 2 + ("lse" in plan.behind)
        seen.add((row.dtype_o.name, expect["numHeadDimCtasV"]))
    if golden.is_complete:
        assert len(seen) > 2


def test_recorded_lse_kernels_are_launched_last(blackwell: FakeDriver, manifest: _core.Manifest) -> None:
    items = [*itertools.islice(recorded(lse=True), 20), *itertools.islice(recorded(lse=True, reduction=True), 20)]
    for item in items:
        call = read_call(item["problem"])
        expect = item["expect"]["lse_kernel"]
        plan = Plan(call, manifest)
        stream = blackwell.new_stream()
        blackwell.clear()
        plan.launch(stream=stream, enable_pdl=call.enable_pdl)
        attention, lse = blackwell.launches[0], blackwell.launches[-1]
        assert len(blackwell.launches) == 1 + len(plan.behind)
        check_common(lse, expect, plan.behind["lse"], int(call.enable_pdl), stream)
        stats = attention.pointer(PTR_SOFTMAX_STATS)
        heads = expect["num_heads_q"]
        assert LSE_ARGUMENTS.unpack(lse.params) == (stats, 0x7F80_0000_0000, heads, heads, 1, expect["n"])
        # The statistics lie in the scratch, behind the partial results.
        shape = plan.decision.shape
        partials = shape.partial_stats_bytes + shape.partial_o_bytes
        begin = attention.pointer(PTR_PARTIAL_STATS) or BUFFERS["scratch"]
        assert stats % _core.SCRATCH_ALIGNMENT == 0 and begin + partials <= stats
        assert stats + 8 * expect["n"] <= BUFFERS["scratch"] + plan.scratch_bytes


def test_scratch_for_the_statistics_is_checked(blackwell: FakeDriver, manifest: _core.Manifest) -> None:
    plan = Plan(read_call(next(recorded(lse=True))["problem"]), manifest)
    need = plan.scratch_bytes - _core.SCRATCH_ALIGNMENT
    plan.launch(scratch_bytes=need)
    plan.launch(scratch=BUFFERS["scratch"] + 1, scratch_bytes=need + _core.SCRATCH_ALIGNMENT - 1)
    blackwell.clear()
    with pytest.raises(InvalidArgument, match=r"softmax statistics [1-9]"):
        plan.launch(scratch_bytes=need - 1)
    assert blackwell.launches == []


def test_a_kernel_is_never_launched_without_its_followers(blackwell: FakeDriver, manifest: _core.Manifest) -> None:
    plan = Plan(read_call(next(recorded(reduction=True, lse=False))["problem"]), manifest)
    with pytest.raises(InvalidArgument, match="asked: a reduction, no LSE kernel; found: no reduction, no LSE kernel"):
        plan.launcher()
    with pytest.raises(InvalidArgument, match="found: a reduction, an LSE kernel"):
        plan.launcher(reduction=plan.kernel.function, lse=plan.kernel.function)


def test_a_refused_follower_is_named(blackwell: FakeDriver, manifest: _core.Manifest) -> None:
    plan = Plan(read_call(next(recorded(reduction=True))["problem"]), manifest)
    plan.launch()
    blackwell.fail("cuLaunchKernelEx", 1, skip=1)
    with pytest.raises(DriverError, match="launching the reduction behind kernel on device 0"):
        plan.launch()
    plan = Plan(read_call(next(recorded(reduction=False, lse=True))["problem"]), manifest)
    blackwell.fail("cuLaunchKernelEx", 1, skip=1)
    with pytest.raises(DriverError, match="launching the LSE kernel behind kernel on device 0"):
        plan.launch()


def test_the_loader_asks_for_the_parameters_that_will_be_passed(blackwell: FakeDriver) -> None:
    with pytest.raises(IntegrityError, match=r"other parameters.*asked: 1280 bytes.*found: 44 bytes"):
        loader.load(store.find("trtllm-gen-lse/sm100f_lse.cubin"), 0)


@pytest.mark.parametrize("sm", [100, 103])
def test_shipped_followers_load_on_both_gpus(fake: FakeDriver, sm: int) -> None:
    fake.set_device(0, sm=sm, sm_count=148)
    for family, size in (
        ("trtllm-gen-reduction", _core.REDUCTION_PARAM_BYTES),
        ("trtllm-gen-lse", _core.LSE_PARAM_BYTES),
    ):
        for artifact in store.default_store().lock.of_family(family):
            assert loader.load(store.find(artifact.path), 0, param_bytes=size).function


def test_every_separate_reduction_has_a_cubin(manifest: _core.Manifest) -> None:
    """For all rows of NVIDIA's table: a tile, a width and an output that our kernels are made for."""
    paths = {artifact.path for artifact in store.default_store().lock.of_family("trtllm-gen-reduction")}
    found = set()
    for row in (manifest[i] for i in range(len(manifest))):
        if row.multi_ctas_kv_mode is not _core.MultiCtasKvMode.GmemReductionWithSeparateKernel:
            continue
        columns = row.head_dim_per_cta_v * (2 if row.uses_2cta_mma else 1)
        assert columns in (64, 128, 256, 512) and row.head_dim_v % columns == 0
        assert row.tile_size_kv == row.step_kv == 128 and row.tile_size_q == row.step_q and row.groups_heads_q
        # Outputs of another dtype than the query's come from E4M3 queries alone: they decide the partial results'.
        assert row.dtype_q in (row.dtype_o, _core.DataType.E4M3)
        found.add(f"trtllm-gen-reduction/sm100f_reduction_{row.dtype_o.name.lower()}.cubin")
    # E2M1 is the exception; the selector knows (test_trtllm_gen_select.py has random problems of all outputs).
    assert found - paths == {"trtllm-gen-reduction/sm100f_reduction_e2m1.cubin"}
    assert paths <= found


@pytest.mark.parametrize("q_len", [1, 4, 16])
@pytest.mark.parametrize("group", [8, 16, 64])
def test_an_e2m1_output_never_needs_the_reduction(manifest: _core.Manifest, group: int, q_len: int) -> None:
    e4m3, e2m1 = _core.DataType.E4M3, _core.DataType.E2M1
    kv = {"dtype_q": e4m3, "dtype_k": e4m3, "dtype_v": e4m3, "dtype_o": e2m1}
    gpu = _core.Device(sm=100, sm_count=148, max_smem_bytes=232448, max_cluster_size=16)
    asked = problem(batch=2, heads_q=2 * group, heads_kv=2, dim=512, page=32, q_len=q_len, **kv)
    decision = _core.select(asked, manifest, gpu)
    assert decision.row >= 0
    assert _core.followers(asked, manifest, decision) == (None, None)


def test_replay_and_launch_tell_the_same(manifest: _core.Manifest) -> None:
    item = next(recorded(reduction=True))
    call = read_call(item["problem"])
    decision = _core.select(call.problem, manifest, call.device)
    launch = _core.separate_reduction(call.problem, manifest, decision, call.device)
    record = replay(item["problem"], manifest)["reduction"]
    assert (launch["grid"], launch["head_dim_v"]) == (record["grid"], record["headDimV"])
    assert _core.followers(call.problem, manifest, decision)[0] is not None


def test_own_families_have_no_followers(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction", has_lse=True)
    assert _core.followers(plan.problem, plan.manifest, plan.decision) == (None, None)
    plan.launch(lse=0x2000)
    assert len(fake.launches) == 1
    with pytest.raises(InvalidArgument, match="other kernels follow this one"):
        function, context = plan.kernel.function, open_device(0).context
        _core.Launcher(driver(), problem(), plan.manifest, plan.decision, function, 0, context, "kernel", lse=function)


def test_a_plan_brings_its_followers(
    blackwell: FakeDriver, manifest: _core.Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = store.find

    def find(path: str) -> VerifiedCubin:
        is_ours = path.startswith(("trtllm-gen-reduction/", "trtllm-gen-lse/"))
        return shipped(path) if is_ours else tiny_cubin(path.split("/")[1].removesuffix(".cubin"), arch="sm_100f")

    monkeypatch.setattr(store, "find", find)
    call = read_call(next(recorded(reduction=True))["problem"])
    call.problem.has_lse = True
    workspace = view("workspace_buffer", FakeTensor((64 << 20,), "uint8", ptr=BUFFERS["scratch"]))
    made = plan_module.DecodePlan.create(
        call.problem,
        0,
        backend="trtllm-gen",
        stream=blackwell.new_stream(),
        workspace=workspace,
        value_offset=0,
        out_dtype="bfloat16",
    )
    blackwell.clear()
    made.launcher.launch(**(BUFFERS | {"lse": 0x2000}))
    assert [len(launch.params) for launch in blackwell.launches] == [
        PARAMS,
        _core.REDUCTION_PARAM_BYTES - 1,  # without the byte that pads its three flags
        LSE_ARGUMENTS.size,
    ]
