"""From a loaded kernel to the recorded cuLaunchKernelEx."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from fake_driver.driver import FakeDriver
from fake_driver.warm import BUFFERS, problem, tiny_cubin, warm
from fmha_dispatch import _core, loader
from fmha_dispatch.device import describe, driver
from fmha_dispatch.errors import DriverError, InvalidArgument

# Byte offsets in KernelParams.
TMA_Q, TMA_K, TMA_V = 0, 128, 384
PTR_O, PTR_SINKS, PTR_CUM_SEQ_LENS_Q, PTR_COUNTER = 912, 928, 936, 984
PTR_OUTPUT_SCALE, PTR_PAGE_IDX, PTR_PARTIAL_O, PTR_PARTIAL_STATS = 992, 1000, 1008, 1016
PTR_SCALE_SOFTMAX_LOG2, PTR_SEQ_LENS_KV = 1056, 1080
OUTPUT_SCALE, SCALE_SOFTMAX_LOG2, PTR_LSE = 1216, 1220, 1256
CLUSTER, POLICY, PDL = 4, 5, 6
SLOTS = {TMA_Q: "q", TMA_K: "k", TMA_V: "v"}

MODES = ("Disabled", "GmemReduction", "CgaSmemReduction")


@pytest.mark.parametrize("mode", MODES)
def test_launch_is_what_the_decision_says(fake: FakeDriver, mode: str) -> None:
    plan = warm(mode=mode)
    stream = fake.new_stream()
    plan.launch(stream=stream)
    (launch,) = fake.launches
    assert launch.result == 0
    assert list(launch.grid) == list(plan.shape.grid)
    assert launch.block == (plan.row.threads, 1, 1)
    assert launch.smem == plan.row.smem_bytes
    assert launch.function == plan.kernel.function
    assert launch.stream == stream
    assert launch.attributes == {
        CLUSTER: (plan.shape.cluster, 1, 1),
        POLICY: (int(plan.shape.cluster > 1), 0, 0),
        PDL: (1, 0, 0),
    }
    assert (plan.shape.cluster > 1) == (mode == "CgaSmemReduction")
    assert (launch.pointer(PTR_COUNTER) != 0) == (mode == "GmemReduction")


def test_pointers_and_scales_arrive(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction", has_sinks=True, has_lse=True, ragged_q=True)
    plan.launch(
        sinks=0x1000, lse=0x2000, cum_seq_lens_q=0x3000, bmm1_scale=0.5, bmm2_scale=3.0, scratch=0x7F60_0000_0001
    )
    (launch,) = fake.launches
    assert launch.pointer(PTR_O) == BUFFERS["o"]
    assert launch.pointer(PTR_SEQ_LENS_KV) == BUFFERS["seq_lens"]
    assert launch.pointer(PTR_PAGE_IDX) == BUFFERS["block_tables"]
    assert launch.pointer(PTR_SINKS) == 0x1000
    assert launch.pointer(PTR_LSE) == 0x2000
    assert launch.pointer(PTR_CUM_SEQ_LENS_Q) == 0x3000
    assert launch.number(SCALE_SOFTMAX_LOG2) == pytest.approx(0.5 * math.log2(math.e), rel=1e-7)
    assert launch.number(OUTPUT_SCALE) == 3.0
    assert launch.pointer(PTR_SCALE_SOFTMAX_LOG2) == launch.pointer(PTR_OUTPUT_SCALE) == 0
    # Scratch is taken from the first aligned byte on.
    assert launch.pointer(PTR_PARTIAL_STATS) == 0x7F60_0000_0100
    assert launch.pointer(PTR_PARTIAL_O) == 0x7F60_0000_0100 + plan.shape.partial_stats_bytes

    fake.clear()
    plan.launch(sinks=0x1000, lse=0x2000, cum_seq_lens_q=0x3000, bmm1_scale_log2_ptr=0x4000, bmm2_scale_ptr=0x5000)
    (launch,) = fake.launches
    assert launch.pointer(PTR_SCALE_SOFTMAX_LOG2) == 0x4000
    assert launch.pointer(PTR_OUTPUT_SCALE) == 0x5000


def test_tensor_maps_are_encoded_as_the_core_says_and_land_in_their_slots(fake: FakeDriver) -> None:
    plan = warm()
    plan.launch()
    buffers = _core.Buffers(q=BUFFERS["q"], k=BUFFERS["k"], v=BUFFERS["v"])
    expected = _core.tensor_maps(plan.problem, plan.manifest, plan.decision, buffers)
    assert len(fake.tensor_maps) == len(expected) == 3
    for seen, wanted in zip(fake.tensor_maps, expected, strict=True):
        for field, value in wanted.items():
            if field == "slot":
                continue
            got = getattr(seen, field)
            assert (list(got) if isinstance(got, tuple) else got) == value, field
    (launch,) = fake.launches
    for slot, name in SLOTS.items():
        assert launch.tensor_map_addr(slot) == BUFFERS[name]


def test_tensor_maps_are_encoded_again_only_for_a_new_address(fake: FakeDriver) -> None:
    plan = warm()
    plan.launch()
    fake.clear()
    plan.launch()
    assert fake.tensor_maps == []
    plan.launch(q=0x7F00_0001_0000)
    assert [encoded.addr for encoded in fake.tensor_maps] == [0x7F00_0001_0000]
    assert fake.launches[-1].tensor_map_addr(TMA_Q) == 0x7F00_0001_0000
    assert fake.launches[-1].tensor_map_addr(TMA_K) == BUFFERS["k"]
    plan.launch(k=0x7F10_0001_0000, v=0x7F20_0001_0000)
    assert fake.launches[-1].tensor_map_addr(TMA_K) == 0x7F10_0001_0000
    assert fake.launches[-1].tensor_map_addr(TMA_V) == 0x7F20_0001_0000


def test_a_failing_encode_names_slot_and_arguments_and_is_not_remembered(fake: FakeDriver) -> None:
    plan = warm()
    fake.fail("cuTensorMapEncodeTiled", 1, skip=1)
    with pytest.raises(DriverError) as raised:
        plan.launch()
    text = str(raised.value)
    assert raised.value.code == 1
    assert raised.value.call == "cuTensorMapEncodeTiled"
    for part in ("tmaK_", str(BUFFERS["k"]), "dims [128, 16, 8, 4096]", "strides [", "box [64, 16, 1, 1]", "swizzle 3"):
        assert part in text
    assert plan.row.name in text
    assert fake.launches == []
    plan.launch()
    assert fake.launches[-1].tensor_map_addr(TMA_K) == BUFFERS["k"]


@pytest.mark.parametrize(
    "name, off",
    [
        *(("q", 2), ("k", 8), ("v", 4), ("o", 2), ("o", 8), ("seq_lens", 2), ("block_tables", 1)),
        *(("cum_seq_lens_q", 2), ("sinks", 2), ("lse", 1), ("bmm1_scale_log2_ptr", 2), ("bmm2_scale_ptr", 3)),
    ],
)
def test_a_misaligned_tensor_is_refused_before_anything_is_called(fake: FakeDriver, name: str, off: int) -> None:
    """T4.25: on the GPU it would cost the context."""
    plan = warm()
    fake.clear()
    with pytest.raises(InvalidArgument, match="is not aligned"):
        plan.launch(**{name: (BUFFERS[name] or 0x7F70_0000_0000) + off})
    assert fake.calls() == []


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "seq_lens", "block_tables"])
def test_a_tensor_without_memory_is_refused(fake: FakeDriver, name: str) -> None:
    with pytest.raises(InvalidArgument, match="has no memory"):
        warm().launch(**{name: 0})
    assert fake.launches == []


@pytest.mark.parametrize("short", [1, 10**6])
def test_t3_06_scratch_is_checked_to_the_byte_before_anything_is_called(fake: FakeDriver, short: int) -> None:
    plan = warm(mode="GmemReduction")
    need = plan.shape.partial_stats_bytes + plan.shape.partial_o_bytes
    plan.launch(scratch=0x7F60_0000_0000, scratch_bytes=need)
    plan.launch(scratch=0x7F60_0000_0001, scratch_bytes=need + 255)
    fake.clear()
    for start, room in ((0x7F60_0000_0000, need), (0x7F60_0000_0001, need + 255)):
        with pytest.raises(InvalidArgument, match=f"asked: {room} bytes.*found: {room - short} bytes"):
            plan.launch(scratch=start, scratch_bytes=room - short)
    with pytest.raises(InvalidArgument, match="found: 0 bytes"):
        plan.launch(scratch=0, scratch_bytes=1 << 30)
    assert fake.calls() == []


def test_t4_02_runs_on_the_tensors_device_and_restores_the_callers(fake: FakeDriver) -> None:
    plan = warm(device=1)
    fake.set_current(0)
    plan.launch(stream=fake.new_stream(1))
    (launch,) = fake.launches
    assert launch.device == 1
    assert fake.current_device == 0
    fake.fail("cuLaunchKernelEx", 701)
    with pytest.raises(DriverError):
        plan.launch(stream=fake.new_stream(1))
    assert fake.current_device == 0
    fake.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(DriverError):
        plan.launch(stream=fake.new_stream(1), q=0x7F00_0001_0000)
    assert fake.current_device == 0


def test_t4_02_context_is_left_alone_when_it_is_current(fake: FakeDriver) -> None:
    plan = warm(device=1)
    fake.set_current(1)
    fake.clear()
    plan.launch()
    assert fake.calls("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2") == []


def test_t4_02_no_context_at_all_is_restored_too(fake: FakeDriver) -> None:
    plan = warm(device=1)
    fake.set_current(-1)
    plan.launch()
    assert fake.current_device == -1


def test_t4_02_stream_of_another_device_is_refused(fake: FakeDriver) -> None:
    plan = warm(device=1)
    fake.set_current(0)
    with pytest.raises(InvalidArgument, match="stream belongs to another device"):
        plan.launch(stream=fake.new_stream(0))
    assert fake.launches == []
    assert fake.current_device == 0


def test_t4_09_a_refused_launch_says_what_was_launched(fake: FakeDriver) -> None:
    plan = warm(mode="CgaSmemReduction")
    fake.fail("cuLaunchKernelEx", 701)
    with pytest.raises(DriverError) as raised:
        plan.launch()
    text = str(raised.value)
    grid = ", ".join(map(str, plan.shape.grid))
    for part in (
        "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)",
        plan.row.name,
        "device 0",
        f"grid [{grid}]",
        f"cluster {plan.shape.cluster}",
        "batch 8",
        "s_kv 8192",
        "heads 64/8",
        "head_dim 128",
        "page 16",
        "too many registers",
    ):
        assert part in text
    assert (raised.value.code, raised.value.call) == (701, "cuLaunchKernelEx")


def test_t4_09_batch_65535_launches_and_65536_is_refused_before_the_driver(fake: FakeDriver) -> None:
    plan = warm(batch=65535)
    plan.launch()
    assert fake.launches[-1].result == 0
    assert fake.launches[-1].grid[2] == 65535
    decision = _core.select(problem(batch=65536), plan.manifest, describe(0))
    assert decision.row == -1
    assert decision.reason


@pytest.mark.parametrize("enable_pdl", [True, False])
def test_t4_13_pdl_attribute_is_always_there(fake: FakeDriver, enable_pdl: bool) -> None:
    warm().launch(enable_pdl=enable_pdl)
    (launch,) = fake.launches
    assert launch.pdl == int(enable_pdl)
    assert set(launch.attributes) == {CLUSTER, POLICY, PDL}


def test_a_decision_without_a_row_makes_no_launcher(fake: FakeDriver) -> None:
    plan = warm()
    refused = _core.select(problem(page=17), plan.manifest, describe(0))
    with pytest.raises(InvalidArgument, match="row -1"):
        _core.Launcher(driver(), plan.problem, plan.manifest, refused, plan.kernel.function, 0, fake.context(0), "none")


def test_threads_share_a_launcher(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction")
    errors: list[BaseException] = []

    def work(index: int) -> None:
        stream = fake.new_stream()
        try:
            for step in range(50):
                plan.launch(
                    stream=stream, q=0x7F00_0000_0000 + 4096 * (index * 50 + step), o=0x7F30_0000_0000 + 16 * index
                )
        except BaseException as error:
            errors.append(error)

    streams_before = len(fake.launches)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    launches = fake.launches[streams_before:]
    assert len(launches) == 400
    counters: dict[int, set[int]] = {}
    for launch in launches:
        # Each launch has its own thread's query, whatever map another thread has put in the cache meanwhile.
        index = (launch.pointer(PTR_O) - 0x7F30_0000_0000) // 16
        assert 0 <= (launch.tensor_map_addr(TMA_Q) - 0x7F00_0000_0000) // 4096 - 50 * index < 50
        counters.setdefault(launch.stream, set()).add(launch.pointer(PTR_COUNTER))
    assert all(len(sets) == 1 for sets in counters.values())
    assert len({address for sets in counters.values() for address in sets}) == 8


def test_path_from_cubin_to_launch_calls_the_driver_in_this_order(fake: FakeDriver) -> None:
    plan = warm()
    plan.launch()
    order: list[Any] = []
    for call in fake.calls():
        if call.name in ("cuLibraryLoadData", "cuFuncLoad", "cuTensorMapEncodeTiled", "cuLaunchKernelEx", "cuInit"):
            order.append(call.name)
    assert order == ["cuInit", "cuLibraryLoadData", "cuFuncLoad", *["cuTensorMapEncodeTiled"] * 3, "cuLaunchKernelEx"]
    assert loader.load(tiny_cubin(plan.row.symbol), 0) is plan.kernel
