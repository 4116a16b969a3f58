"""Counters of the split-KV reduction: the library's own, zero when a kernel starts, one set a stream."""

from __future__ import annotations

import ctypes
import itertools
import threading

import pytest

from fake_driver.driver import CAPTURE_ACTIVE, FakeDriver
from fake_driver.test_launch import PTR_COUNTER
from fake_driver.warm import BUFFERS, Warm, warm
from fmha_dispatch.errors import DriverError

COUNTER_BYTES = 4


def counters_of(fake: FakeDriver, plan: Warm, stream: int) -> int:
    plan.launch(stream=stream)
    assert fake.launches[-1].stream == stream
    return fake.launches[-1].pointer(PTR_COUNTER)


def read(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size)


def test_t3_01_counters_are_zero_and_not_in_scratch(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction")
    need = plan.shape.num_counters * COUNTER_BYTES
    assert need > 0
    address = counters_of(fake, plan, fake.new_stream())
    assert read(address, need) == bytes(need)
    assert not BUFFERS["scratch"] <= address < BUFFERS["scratch"] + BUFFERS["scratch_bytes"]
    allocations = fake.calls("cuMemAlloc_v2")
    assert len(allocations) == 1
    (zeroing,) = fake.calls("cuMemsetD8Async")
    start, value, size = zeroing.args
    assert value == 0
    assert size == allocations[0].args[0]  # bytes, not elements
    assert start <= address <= start + size - need


def test_t3_01_address_is_the_same_for_every_launch_of_a_stream(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction")
    stream = fake.new_stream()
    addresses = {counters_of(fake, plan, stream) for _ in range(5)}
    assert len(addresses) == 1
    assert fake.count("cuMemAlloc_v2") == 1


def test_t4_03_streams_and_devices_do_not_share_a_set(fake: FakeDriver) -> None:
    plans = [warm(device, mode="GmemReduction") for device in (0, 1)]
    need = plans[0].shape.num_counters * COUNTER_BYTES
    starts = sorted(
        counters_of(fake, plans[device], stream) for device in (0, 1) for stream in (0, fake.new_stream(device))
    )
    assert all(after - before >= need for before, after in itertools.pairwise(starts))


def test_plans_of_a_stream_share_its_set(fake: FakeDriver) -> None:
    stream = fake.new_stream()
    first, second = (warm(mode="GmemReduction", batch=batch) for batch in (4, 2))
    assert counters_of(fake, first, stream) == counters_of(fake, second, stream)


def test_no_split_no_counters(fake: FakeDriver) -> None:
    assert counters_of(fake, warm(mode="CgaSmemReduction"), fake.new_stream()) == 0
    assert fake.count("cuMemAlloc_v2") == 0


def test_t3_03_a_failed_launch_has_its_counters_zeroed_before_the_next(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction")
    need = plan.shape.num_counters * COUNTER_BYTES
    stream, other = fake.new_stream(), fake.new_stream()
    address, other_address = counters_of(fake, plan, stream), counters_of(fake, plan, other)
    fake.fail("cuLaunchKernelEx", 719)
    with pytest.raises(DriverError, match="719"):
        plan.launch(stream=stream)
    ctypes.memset(address, 0xFF, need)
    fake.clear()
    assert counters_of(fake, plan, other) == other_address
    assert fake.count("cuMemsetD8Async") == 0
    assert counters_of(fake, plan, stream) == address
    assert read(address, need) == bytes(need)
    order = [call.name for call in fake.calls("cuMemsetD8Async", "cuLaunchKernelEx")]
    assert order == ["cuLaunchKernelEx", "cuMemsetD8Async", "cuLaunchKernelEx"]
    assert fake.calls("cuMemsetD8Async")[0].stream == stream
    plan.launch(stream=stream)
    assert fake.count("cuMemsetD8Async") == 1


def test_t3_03_zeroing_stays_inside_the_set(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction")
    first, second = fake.new_stream(), fake.new_stream()
    low, high = sorted(counters_of(fake, plan, stream) for stream in (first, second))
    by_address = {counters_of(fake, plan, stream): stream for stream in (first, second)}
    ctypes.memset(low, 0xAB, 2 * (high - low))
    fake.fail("cuLaunchKernelEx", 719)
    with pytest.raises(DriverError):
        plan.launch(stream=by_address[low])
    plan.launch(stream=by_address[low])
    assert read(low, high - low) == bytes(high - low)
    assert read(high, high - low) == b"\xab" * (high - low)


def test_t4_04_a_stream_that_only_ever_captures_gets_its_counters(fake: FakeDriver) -> None:
    """Allocated beside the capture, which stays whole; not once in a while but for any number of graphs."""
    plan = warm(mode="GmemReduction")
    stream = fake.new_stream()
    seen = set()
    for _ in range(1000):
        fake.begin_capture(stream)
        address = counters_of(fake, plan, stream)
        assert counters_of(fake, plan, stream) == address
        assert fake.end_capture(stream) == CAPTURE_ACTIVE
        assert read(address, 4) == bytes(4)
        seen.add(address)
        fake.clear()
    assert len(seen) == 1000


def test_graphs_captured_on_one_stream_may_run_side_by_side(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction")
    stream = fake.new_stream()
    seen = {counters_of(fake, plan, stream)}
    for _ in range(5):
        fake.begin_capture(stream)
        seen.add(counters_of(fake, plan, stream))
        assert fake.end_capture(stream) == CAPTURE_ACTIVE
    assert len(seen) == 6
    assert counters_of(fake, plan, stream) in seen


def test_allocating_does_not_break_a_capture_on_another_stream(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction")
    captured, eager = fake.new_stream(), fake.new_stream()
    fake.begin_capture(captured)
    plan.launch(stream=eager)
    assert fake.count("cuMemAlloc_v2") == 1
    assert fake.end_capture(captured) == CAPTURE_ACTIVE
    # The thread's own mode is as it was.
    first, second = fake.calls("cuThreadExchangeStreamCaptureMode")[-2:]
    assert (first.args[0], second.args[0]) == (2, 0)


def test_growth_takes_a_new_set_and_keeps_the_old_one_allocated(fake: FakeDriver) -> None:
    stream = fake.new_stream()
    small = warm(mode="GmemReduction")
    large = warm(mode="GmemReduction", batch=16, heads_q=1024, heads_kv=1024)
    need = large.shape.num_counters * COUNTER_BYTES
    first = counters_of(fake, small, stream)
    grown = counters_of(fake, large, stream)
    assert grown != first
    assert read(grown, need) == bytes(need)
    assert counters_of(fake, small, stream) == grown
    assert fake.count("cuMemAlloc_v2") == 2
    assert fake.count("cuMemFree_v2") == 0
    assert read(first, COUNTER_BYTES) == bytes(COUNTER_BYTES)


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuMemAlloc_v2", "cuMemsetD8Async", "cuStreamSynchronize"])
def test_failed_allocation_is_reported_and_tried_again(fake: FakeDriver, call: str) -> None:
    plan = warm(mode="GmemReduction")
    stream = fake.new_stream()
    fake.fail(call, 2)
    with pytest.raises(DriverError, match=r"bytes of split-KV counters.*device memory is full"):
        plan.launch(stream=stream)
    assert fake.launches == []
    assert len(fake.calls("cuMemFree_v2")) == int(call in ("cuMemsetD8Async", "cuStreamSynchronize"))
    assert counters_of(fake, plan, stream) != 0


def test_t4_01_counters_of_a_reset_context_are_not_used_again(fake: FakeDriver) -> None:
    plan = warm(mode="GmemReduction")
    before = counters_of(fake, plan, fake.new_stream())
    fake.reset_primary_context(0)
    again = warm(mode="GmemReduction")
    assert fake.count("cuLibraryLoadData") == 2
    after = counters_of(fake, again, fake.new_stream())
    assert after not in (0, before)
    assert fake.count("cuMemAlloc_v2") == 2
    plan.launch(stream=fake.new_stream())
    assert fake.launches[-1].result == 0


def test_per_thread_default_stream_is_one_stream_a_thread(fake: FakeDriver) -> None:
    per_thread = 2
    plan = warm(mode="GmemReduction")
    seen = [counters_of(fake, plan, per_thread), counters_of(fake, plan, per_thread)]
    thread = threading.Thread(target=lambda: plan.launch(stream=per_thread))
    thread.start()
    thread.join()
    seen.append(fake.launches[-1].pointer(PTR_COUNTER))
    assert seen[0] == seen[1] != seen[2]
