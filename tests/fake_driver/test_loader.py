"""Verified bytes into the driver: once, whole, on the right device, at a time when loading is allowed."""

from __future__ import annotations

import dataclasses
import hashlib
import threading

import pytest

from fake_driver.driver import CAPTURE_ACTIVE, FakeDriver
from fake_driver.warm import tiny_cubin, warm
from fmha_dispatch import device as device_module
from fmha_dispatch import loader
from fmha_dispatch.errors import DeviceError, DriverError, IntegrityError, NotPrepared

MAX_DYNAMIC_SMEM, NON_PORTABLE_CLUSTER = 8, 14
# What the loader calls after the context is open, in order.
LOAD_CALLS = (
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelGetAttribute",
    "cuKernelSetAttribute",
    "cuKernelGetFunction",
    "cuFuncLoad",
)


def test_the_driver_gets_exactly_the_verified_bytes(fake: FakeDriver) -> None:
    cubin = tiny_cubin(salt=bytes(range(256)) * 40)
    kernel = loader.load(cubin, 0)
    (loaded,) = fake.calls("cuLibraryLoadData")
    assert hashlib.sha256(loaded.blob).hexdigest() == cubin.sha256
    assert (kernel.name, kernel.device, kernel.context) == (cubin.name, 0, fake.context(0))
    assert kernel.load_seconds > 0
    assert kernel.device_bytes == len(cubin.data)
    (entry,) = fake.calls("cuLibraryGetKernel")
    assert entry.blob.decode() == cubin.symbol


def test_t4_01_each_device_loads_and_gets_its_attributes(fake: FakeDriver) -> None:
    cubin = tiny_cubin()
    fake.set_device(1, sm_count=78, max_smem_bytes=101376)
    kernels = [loader.load(cubin, device) for _ in range(10) for device in (0, 1)]
    assert fake.count("cuLibraryLoadData") == 2
    assert len({id(kernel) for kernel in kernels}) == 2
    assert kernels[0].function != kernels[1].function
    attributes = [call.args for call in fake.calls("cuKernelSetAttribute")]
    for device, smem in ((0, 232448), (1, 101376)):
        function = kernels[device].function
        assert (MAX_DYNAMIC_SMEM, smem, function, device) in attributes
        assert (NON_PORTABLE_CLUSTER, 1, function, device) in attributes
    assert [call.device for call in fake.calls("cuLibraryLoadData")] == [0, 1]


def test_t4_01_no_handle_of_one_device_reaches_the_other(fake: FakeDriver) -> None:
    plans = [warm(0), warm(1)]
    for _ in range(10):
        for plan in plans:
            plan.launch()
    assert [launch.result for launch in fake.launches] == [0] * 20
    for device, plan in enumerate(plans):
        assert {launch.function for launch in fake.launches if launch.device == device} == {plan.kernel.function}


def test_t4_01_reset_of_the_primary_context_means_a_new_load(fake: FakeDriver) -> None:
    cubin = tiny_cubin()
    before = loader.load(cubin, 0)
    fake.reset_primary_context(0)
    after = loader.load(cubin, 0)
    assert fake.count("cuLibraryLoadData") == 2
    assert after.context_id != before.context_id
    assert loader.load(cubin, 0) is after


def test_t4_02_loading_restores_the_callers_context(fake: FakeDriver) -> None:
    fake.set_current(0)
    loader.load(tiny_cubin(), 1)
    assert fake.current_device == 0
    fake.fail("cuFuncLoad", 2)
    with pytest.raises(DriverError):
        loader.load(tiny_cubin(salt=b"another"), 1)
    assert fake.current_device == 0


def test_32_threads_load_a_kernel_once(fake: FakeDriver) -> None:
    fake.delay("cuLibraryLoadData", 20_000)
    cubin = tiny_cubin()
    barrier = threading.Barrier(32)
    loaded: list[loader.LoadedKernel] = []

    def work() -> None:
        barrier.wait()
        loaded.append(loader.load(cubin, 0))

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 32
    assert len({id(kernel) for kernel in loaded}) == 1
    assert fake.count("cuLibraryLoadData") == 1
    assert fake.count("cuInit") == 1


def test_t4_04_loading_under_capture_is_refused_before_any_forbidden_call(fake: FakeDriver) -> None:
    device_module.open_device(0)
    stream = fake.new_stream()
    fake.begin_capture(stream)
    fake.clear()
    cubin = tiny_cubin()
    with pytest.raises(NotPrepared) as raised:
        loader.load(cubin, 0, stream=stream)
    assert cubin.name in str(raised.value)
    assert "prepare()" in str(raised.value)
    assert fake.calls(*LOAD_CALLS) == []
    assert fake.end_capture(stream) == CAPTURE_ACTIVE


@pytest.mark.parametrize("stream", [None, 0, 1, 2])
def test_default_streams_load_also_when_no_context_is_current(fake: FakeDriver, stream: int | None) -> None:
    fake.set_current(-1)
    assert loader.load(tiny_cubin(), 1, stream=stream).device == 1
    assert fake.current_device == -1


def test_t4_04_a_loaded_kernel_is_captured_without_a_load(fake: FakeDriver) -> None:
    plan = warm()
    stream = fake.new_stream()
    fake.clear()
    fake.begin_capture(stream)
    assert loader.load(tiny_cubin(plan.row.symbol), 0, stream=stream) is plan.kernel
    plan.launch(stream=stream)
    assert fake.launches[0].result == 0
    assert fake.calls(*LOAD_CALLS) == []
    assert fake.end_capture(stream) == CAPTURE_ACTIVE


def test_t4_04_loading_leaves_the_capture_of_another_thread_whole(fake: FakeDriver) -> None:
    stream = fake.new_stream()
    fake.begin_capture(stream)
    loader.load(tiny_cubin(), 0)
    assert fake.end_capture(stream) == CAPTURE_ACTIVE


def test_t4_07_out_of_memory_says_how_much_and_what_to_do(fake: FakeDriver) -> None:
    cubin = tiny_cubin()
    for call in ("cuLibraryLoadData", "cuFuncLoad"):
        fake.fail(call, 2)
        with pytest.raises(DriverError) as raised:
            loader.load(cubin, 0)
        assert f"{len(cubin.data)} bytes" in str(raised.value)
        assert "prepare() before the KV cache is allocated" in str(raised.value)
    assert loader.load(cubin, 0).device == 0


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        (209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "another GPU architecture"),
        (200, "CUDA_ERROR_INVALID_IMAGE", "newer than the driver"),
        (222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "driver is too old"),
        (218, "CUDA_ERROR_INVALID_PTX", "driver is too old"),
        (2, "CUDA_ERROR_OUT_OF_MEMORY", "device memory is full"),
        (301, "CUDA_ERROR_FILE_NOT_FOUND", "reinstall the driver"),
        (303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "reinstall the driver"),
        (9999, "CUresult 9999", ""),
    ],
)
def test_t2_15_load_errors_in_plain_words(fake: FakeDriver, code: int, name: str, words: str) -> None:
    cubin = tiny_cubin()
    fake.fail("cuLibraryLoadData", code)
    with pytest.raises(DriverError) as raised:
        loader.load(cubin, 0)
    text = str(raised.value)
    for part in (name, str(code), words, cubin.name, cubin.sha256, "file is intact", "sm_90a", "sm_90", "CUDA 13.0"):
        assert part in text
    assert (raised.value.code, raised.value.call) == (code, "cuLibraryLoadData")


@pytest.mark.parametrize("call", LOAD_CALLS[1:])
def test_a_kernel_that_cannot_be_set_up_is_unloaded_and_not_remembered(fake: FakeDriver, call: str) -> None:
    cubin = tiny_cubin()
    fake.fail(call, 1)
    with pytest.raises(DriverError, match=call):
        loader.load(cubin, 0)
    assert fake.count("cuLibraryUnload") == 1
    loader.load(cubin, 0)
    assert fake.count("cuLibraryLoadData") == 2


@pytest.mark.parametrize("code", [1, 2, 9999])
@pytest.mark.parametrize("skip", [0, 1])
def test_a_driver_that_does_not_tell_free_memory_loads_all_the_same(fake: FakeDriver, code: int, skip: int) -> None:
    fake.fail("cuMemGetInfo_v2", code, skip=skip)
    kernel = loader.load(tiny_cubin(), 0)
    assert kernel.device_bytes == 0
    assert (fake.count("cuLibraryLoadData"), fake.count("cuLibraryUnload")) == (1, 0)
    assert loader.load(tiny_cubin(), 0) is kernel


def test_nothing_leaks_whichever_call_of_a_load_fails(fake: FakeDriver) -> None:
    """Each call in turn, by its number: the library is unloaded or remembered, and the thread is as it was."""
    loader.load(tiny_cubin(salt=b"first"), 0)
    fake.clear()
    loader.load(tiny_cubin(salt=b"sound"), 0)
    names = [call.name for call in fake.calls()]
    for number, name in enumerate(names):
        fake.clear()
        cubin = tiny_cubin(salt=b"%d" % number)
        fake.fail(name, 1, skip=names[:number].count(name))
        try:
            loader.load(cubin, 0)
        except DriverError as error:
            assert name.startswith(error.call)
        fake.stop_failing()
        assert fake.current_device == (0 if name == "cuCtxPopCurrent_v2" else -1)
        if fake.current_device == 0:
            fake.set_current(-1)
        loader.load(cubin, 0)
        loads = [call for call in fake.calls("cuLibraryLoadData") if call.result == 0]
        assert len(loads) - fake.count("cuLibraryUnload") == 1, name


def test_a_symbol_that_the_cubin_lacks_is_named(fake: FakeDriver) -> None:
    cubin = dataclasses.replace(tiny_cubin(), symbol="no_such_kernel")
    with pytest.raises(DriverError, match=r"no_such_kernel.*no entry point of that name"):
        loader.load(cubin, 0)


def test_t1_02_another_param_size_never_reaches_the_driver(fake: FakeDriver) -> None:
    device_module.open_device(0)
    fake.clear()
    with pytest.raises(IntegrityError, match=r"1280 bytes; found: 1216 bytes"):
        loader.load(tiny_cubin(param_bytes=1216), 0)
    assert fake.calls(*LOAD_CALLS) == []


@pytest.mark.parametrize(
    ("arch", "runs", "not_on"),
    [
        ("sm_90a", {90}, {80, 89, 100, 120}),
        ("sm_90", {90}, {80, 89, 100}),
        ("sm_80", {80, 86, 89}, {75, 90}),
        ("sm_89", {89}, {80, 86, 90}),
        ("sm_100a", {100}, {90, 103, 110, 120}),
        ("sm_100f", {100, 103}, {90, 110, 120, 121}),
        ("sm_103a", {103}, {100}),
        ("sm_120", {120, 121}, {100, 103}),
        ("compute_90", set(), {90}),
        ("", set(), {90}),
    ],
)
def test_t2_11_arch_table(arch: str, runs: set[int], not_on: set[int]) -> None:
    assert all(loader.runs_on(arch, sm) for sm in runs)
    assert not any(loader.runs_on(arch, sm) for sm in not_on)


def test_t2_11_a_cubin_for_another_gpu_never_reaches_the_driver(fake: FakeDriver) -> None:
    fake.set_device(0, sm=120)
    device_module.open_device(0)
    fake.clear()
    with pytest.raises(DeviceError, match=r"sm_90a; found: cuda:0 is sm_120"):
        loader.load(tiny_cubin(), 0)
    assert fake.calls(*LOAD_CALLS) == []


def test_t2_16_handles_are_of_one_family(fake: FakeDriver) -> None:
    plan = warm()
    plan.launch()
    names = {call.name for call in fake.calls()}
    assert not {name for name in names if name.startswith("cuModule") or name.startswith("cuFuncSet")}
    set_on = {call.args[2] for call in fake.calls("cuKernelSetAttribute")}
    assert set_on == {plan.kernel.function} == {launch.function for launch in fake.launches}


def test_no_such_device(fake: FakeDriver) -> None:
    for ordinal in (2, -1, 99):
        with pytest.raises(DeviceError, match=rf"no such GPU; asked: cuda:{ordinal}; found: 2 GPU"):
            device_module.describe(ordinal)


def test_no_gpu_at_all(fake: FakeDriver) -> None:
    fake.reset(num_devices=0)
    with pytest.raises(DeviceError, match=r"CUDA_ERROR_NO_DEVICE \(100\).*sees no GPU"):
        device_module.describe(0)


def test_devices_are_described(fake: FakeDriver) -> None:
    fake.set_device(1, sm=103, sm_count=152, max_smem_bytes=232449)
    described = device_module.describe(1)
    assert (described.sm, described.sm_count, described.max_smem_bytes) == (103, 152, 232449)
    assert device_module.open_device(1).name == "Fake GPU"
    assert device_module.open_device(0).context == fake.context(0)
