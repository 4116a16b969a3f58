"""The whole path of a decode call, lock to recorded launch, with the real cubins and a driver that only records."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_tensor import FakeTensor
from hypothesis import given
from hypothesis import strategies as st

import fmha_dispatch
from fake_driver.driver import CAPTURE_ACTIVE, FakeDriver
from fake_driver.warm import tiny_cubin
from fmha_dispatch import _core, decode, store
from fmha_dispatch.cubin import VerifiedCubin
from fmha_dispatch.errors import DriverError, FmhaError, IntegrityError, InvalidArgument, NotPrepared, Unsupported
from fmha_dispatch.explain import H200
from fmha_dispatch.lockfile import LockFile, installed_lock
from fmha_dispatch.plan import workspace_bound, workspace_bytes
from fmha_dispatch.problem import dense_decode_problem
from fmha_dispatch.settings import Settings
from fmha_dispatch.sources import DATA

B, HQ, HKV, D, PAGE, WIDTH = 8, 96, 8, 128, 16, 512
PTR_O, PTR_SINKS, PTR_CUM, PTR_TABLES, PTR_SEQ_LENS, PTR_LSE = 912, 928, 936, 1000, 1080, 1256
WINDOW, BATCH, MAX_PAGES, TOKENS_PER_CTA, SCALE_LOG2 = 1112, 1116, 1160, 1204, 1220


@pytest.fixture
def on_fake(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The fake driver, with a stream of its own as torch's current stream, and no plan from another test."""
    streams: dict[int, int] = {}
    monkeypatch.setattr(decode, "current_stream", lambda device: streams.setdefault(device, fake.new_stream(device)))
    monkeypatch.setattr(decode, "empty", lambda shape, dtype, like: FakeTensor(shape, dtype, device=like.get_device()))
    decode.forget_plans()
    yield fake
    decode.forget_plans()


def call(q_len: int = 1, device: int = 0, batch: int = B, **changed: Any) -> dict[str, Any]:
    def on(shape: tuple[int, ...], dtype: str, ptr: int) -> FakeTensor:
        return FakeTensor(shape, dtype, device=device, ptr=ptr)

    pages = batch * WIDTH
    return {
        "query": on((batch * q_len, HQ, D), "bfloat16", 0x7F1000000000),
        "kv_cache": (
            on((pages, HKV, PAGE, D), "bfloat16", 0x7F2000000000),
            on((pages, HKV, PAGE, D), "bfloat16", 0x7F3000000000),
        ),
        "workspace_buffer": on((128 << 20,), "uint8", 0x7F4000000000),
        "block_tables": on((batch, WIDTH), "int32", 0x7F5000000000),
        "seq_lens": on((batch,), "int32", 0x7F6000000000),
        "max_seq_len": WIDTH * PAGE,
        "bmm1_scale": 0.125,
        "out": on((batch * q_len, HQ, D), "bfloat16", 0x7F7000000000),
        "q_len_per_req": q_len,
        **changed,
    }


def dense_problem(batch_size: int = 1, q_len: int = 1, kv_len: int = WIDTH * PAGE) -> _core.Problem:
    return dense_decode_problem(
        dtype="bfloat16",
        batch_size=batch_size,
        q_len=q_len,
        kv_len=kv_len,
        num_heads_q=HQ,
        num_heads_kv=HKV,
        head_dim=D,
        page_size=PAGE,
    )


def run(**arguments: Any) -> Any:
    return fmha_dispatch.trtllm_batch_decode_with_kv_cache(**arguments)


def test_lock_to_launch(on_fake: FakeDriver) -> None:
    sinks = FakeTensor((HQ,), "float32", ptr=0x7F8000000000)
    lse = FakeTensor((B * 4, HQ), "float32", ptr=0x7F9000000000)
    arguments = call(4, sinks=sinks, lse=lse, window_left=1023, return_lse=True)
    assert run(**arguments) == (arguments["out"], lse)

    (loaded,) = on_fake.calls("cuLibraryLoadData")
    digest = hashlib.sha256(loaded.blob).hexdigest()
    artifact = installed_lock().by_path["hopper/sm90a_decode_bf16_d128_q64.cubin"]
    assert digest == artifact.sha256, "what the driver gets is what the lock names"

    (launch,) = on_fake.launches
    assert launch.stream == decode.current_stream(0) and launch.device == 0
    assert launch.grid[1:] == (HKV, B)
    assert launch.pdl == 1
    assert launch.pointer(PTR_O) == 0x7F7000000000
    assert launch.pointer(PTR_TABLES) == 0x7F5000000000
    assert launch.pointer(PTR_SEQ_LENS) == 0x7F6000000000
    assert launch.pointer(PTR_SINKS) == 0x7F8000000000
    assert launch.pointer(PTR_LSE) == 0x7F9000000000
    assert launch.pointer(PTR_CUM) == 0
    assert (launch.integer(WINDOW), launch.integer(BATCH), launch.integer(MAX_PAGES)) == (1024, B, WIDTH)
    assert launch.integer(TOKENS_PER_CTA) == 64 // (HQ // HKV)
    assert launch.number(SCALE_LOG2) == pytest.approx(0.125 * 1.4426950408889634)
    query, key, value = on_fake.tensor_maps
    assert (query.addr, query.dims, query.box) == (0x7F1000000000, (D, 12, HKV, B * 4), (64, 12, 1, 5))
    assert (key.addr, key.dims, key.box) == (0x7F2000000000, (D, PAGE, HKV, B * WIDTH), (64, PAGE, 1, 1))
    assert value.addr == 0x7F3000000000


def test_outputs_are_allocated_when_not_given(on_fake: FakeDriver) -> None:
    out, lse = run(**call(2, out=None, return_lse=True))
    assert (out.shape, out.dtype) == ((B * 2, HQ, D), "bfloat16")
    assert (lse.shape, lse.dtype) == ((B * 2, HQ), "float32")
    assert on_fake.launches[-1].pointer(PTR_LSE) == lse.data_ptr()


def test_T4_01_a_warm_call_loads_nothing(on_fake: FakeDriver) -> None:
    arguments = call()
    run(**arguments)
    on_fake.clear()
    for _ in range(3):
        run(**arguments)
    assert {record.name for record in on_fake.calls()} <= {
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuStreamGetCtx",
        "cuStreamGetCaptureInfo_v2",
        "cuLaunchKernelEx",
    }
    assert len(on_fake.launches) == 3


def test_no_bound_for_what_no_kernel_takes(on_fake: FakeDriver) -> None:
    from fmha_dispatch.device import describe

    for changed in ({"head_dim": 96}, {"dtype": "float8_e4m3fn"}):
        facts = {"dtype": "bfloat16", "head_dim": D, **changed}
        asked = dense_decode_problem(
            batch_size=1, q_len=1, kv_len=64, num_heads_q=HQ, num_heads_kv=HKV, page_size=PAGE, **facts
        )
        with pytest.raises(Unsupported, match="no kernel for"):
            workspace_bound(asked, describe(0))


def test_a_new_shape_of_a_loaded_kernel_reads_no_file(on_fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    run(**call())
    monkeypatch.setattr(store, "find", lambda path: pytest.fail(f"read {path} again"))
    run(**call(batch=9))
    assert len(on_fake.launches) == 2 and on_fake.count("cuLibraryLoadData") == 1


def test_T4_06_prepared_problems_load_nothing_later(on_fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [dense_problem(batch_size=batch, q_len=q_len) for batch in (1, 8, 64) for q_len in (1, 2, 4, 8)]
    kernels = fmha_dispatch.prepare(problems)
    assert {kernel.name for kernel in kernels} == {
        f"hopper/sm90a_decode_bf16_d128_q{tile}.cubin" for tile in (16, 32, 64, 128)
    }
    assert fmha_dispatch.prepare(problems) == kernels
    on_fake.clear()
    monkeypatch.setattr(store, "find", lambda path: pytest.fail(f"read {path} again"))
    stream = decode.current_stream(0)
    on_fake.begin_capture(stream)
    for batch in (1, 8, 64):
        for q_len in (1, 2, 4, 8):
            run(**call(q_len, batch=batch))
    assert on_fake.end_capture(stream) == CAPTURE_ACTIVE
    assert on_fake.count("cuLibraryLoadData") == 0 and len(on_fake.launches) == 12


def test_T4_01_calls_recover_from_a_reset_of_the_primary_context(
    on_fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(**call())
    on_fake.reset_primary_context(0)
    with pytest.raises(DriverError):  # the work of that context is lost, and the caller must know
        run(**call())
    stream = on_fake.new_stream(0)
    monkeypatch.setattr(decode, "current_stream", lambda device: stream)
    run(**call())
    assert on_fake.launches[-1].result == 0


# Two calls that differ in one argument, and what must differ in the launch.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window_left": ({}, {"window_left": 127}),
    "max_seq_len": ({"max_seq_len": 512}, {"max_seq_len": 8192}),
    "kv_layout": (
        {"kv_cache": (FakeTensor((64, PAGE, PAGE, D)), FakeTensor((64, PAGE, PAGE, D)))},
        {"kv_cache": (FakeTensor((64, PAGE, PAGE, D)), FakeTensor((64, PAGE, PAGE, D))), "kv_layout": "NHD"},
    ),
    "q_len_per_req": (
        {"query": FakeTensor((8, HQ, D)), "out": FakeTensor((8, HQ, D)), "q_len_per_req": 1},
        {
            "query": FakeTensor((8, HQ, D)),
            "out": FakeTensor((8, HQ, D)),
            "q_len_per_req": 2,
            "block_tables": FakeTensor((4, WIDTH), "int32"),
            "seq_lens": FakeTensor((4,), "int32"),
        },
    ),
    "max_q_len": (
        {"q_len_per_req": None, "max_q_len": 2, "cum_seq_lens_q": FakeTensor((B + 1,), "int32")},
        {"q_len_per_req": None, "max_q_len": 4, "cum_seq_lens_q": FakeTensor((B + 1,), "int32")},
    ),
    "dtype": (
        {},
        {
            "query": FakeTensor((B, HQ, D), "float16"),
            "out": FakeTensor((B, HQ, D), "float16"),
            "kv_cache": tuple(FakeTensor((B * WIDTH, HKV, PAGE, D), "float16") for _ in range(2)),
        },
    ),
    "query strides": ({}, {"query": FakeTensor((B, HQ, D), strides=(2 * HQ * D, D, 1), ptr=0x7F1000000000)}),
    "V strides": (
        {},
        {
            "kv_cache": (
                FakeTensor((B * WIDTH, HKV, PAGE, D), ptr=0x7F2000000000),
                FakeTensor((B * WIDTH, HKV, PAGE, D), ptr=0x7F3000000000, strides=(2 * HKV * PAGE * D, PAGE * D, D, 1)),
            )
        },
    ),
    "table pitch": ({}, {"block_tables": FakeTensor((B, WIDTH), "int32", strides=(1024, 1), ptr=0x7F5000000000)}),
    "table kind": (
        {"block_tables": FakeTensor((B, WIDTH), "int32")},
        {"block_tables": FakeTensor((B, 2, WIDTH), "int32"), "uses_shared_paged_kv_idx": False},
    ),
    "sinks": ({}, {"sinks": FakeTensor((HQ,), "float32")}),
    "lse": ({}, {"lse": FakeTensor((B, HQ), "float32")}),
    "enable_pdl": ({"enable_pdl": False}, {"enable_pdl": True}),
    "bmm2_scale": ({}, {"bmm2_scale": 0.5}),
    "rank-5 cache": ({}, {"kv_cache": FakeTensor((B * WIDTH, 2, HKV, PAGE, D), ptr=0x7F2000000000)}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_one_argument_more_is_another_launch_cold_and_warm(on_fake: FakeDriver, name: str) -> None:
    """Whatever ran before, a call gets the launch that it would get first: no plan serves another call."""

    def launch(changed: dict[str, Any]) -> tuple[Any, ...]:
        on_fake.clear()
        run(**call(**changed))
        got = on_fake.launches[-1]
        return got.params, got.grid, got.pdl, got.function

    first, second = VARIANTS[name]
    cold = []
    maps = []
    for changed in (first, second):
        decode.forget_plans()
        on_fake.clear()
        run(**call(**changed))
        maps.append(on_fake.tensor_maps)
        got = on_fake.launches[-1]
        cold.append((got.params, got.grid, got.pdl, got.function))
    assert cold[0] != cold[1] or maps[0] != maps[1], "the pair shows nothing"
    decode.forget_plans()
    for _ in range(2):
        assert [launch(first), launch(second)] == cold


def test_value_of_a_rank_5_cache_lies_behind_its_key(on_fake: FakeDriver) -> None:
    for _ in range(2):
        run(**call(kv_cache=FakeTensor((B * WIDTH, 2, HKV, PAGE, D), ptr=0x7F2000000000)))
    offset = HKV * PAGE * D * 2
    _, key, value = on_fake.tensor_maps
    assert (key.addr, value.addr) == (0x7F2000000000, 0x7F2000000000 + offset)
    assert key.strides[-1] == value.strides[-1] == 2 * offset
    assert on_fake.launches[-1].tensor_map_addr(384) == 0x7F2000000000 + offset


def test_logit_scale_tensor_is_multiplied_into_log2(on_fake: FakeDriver) -> None:
    class Scale(FakeTensor):
        def __mul__(self, factor: float) -> FakeTensor:
            assert factor == pytest.approx(1.4426950408889634)
            return FakeTensor((1,), "float32", ptr=0x7FC000000000)

    run(**call(bmm1_scale=Scale((1,), "float32")))
    assert on_fake.launches[-1].pointer(1056) == 0x7FC000000000


def test_a_large_working_set_keeps_what_was_used_last(on_fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PLANS", 8)
    for batch in range(1, 30):
        run(**call(batch=batch))
    assert len(decode._plans) <= 8
    on_fake.clear()
    run(**call(batch=29))
    assert on_fake.count("cuTensorMapEncodeTiled") == 0, "the newest plan was dropped"


GARBAGE: list[Any] = [None, 0, -1, 1.5, "x", 10**400, float("nan"), (), [], {}, object(), b"", True, FakeTensor((1,))]


@pytest.mark.parametrize(
    "name", [*sorted(call()), "sinks", "lse", "cum_seq_lens_q", "mask", "o_scale", "enable_pdl", "backend"]
)
def test_garbage_is_a_typed_error_or_harmless(on_fake: FakeDriver, name: str) -> None:
    for value in GARBAGE:
        with contextlib.suppress(FmhaError):
            run(**call(**{name: value}))


def test_growing_max_seq_len_stays_warm(on_fake: FakeDriver) -> None:
    """An engine's longest request grows by a token a step; that must not make a plan a step."""
    for length in range(4097, 4200):
        run(**call(max_seq_len=length))
    assert len(decode._plans) == 1


def test_device_scales_reach_the_kernel_in_log2(on_fake: FakeDriver) -> None:
    scale = FakeTensor((1,), "float32", ptr=0x7FA000000000)
    run(**call(bmm1_scale_log2=scale, bmm2_scale=FakeTensor((1,), "float32", ptr=0x7FB000000000)))
    (launch,) = on_fake.launches
    assert launch.pointer(1056) == 0x7FA000000000 and launch.pointer(992) == 0x7FB000000000
    with pytest.raises(InvalidArgument, match="bmm1_scale_log2"):
        run(**call(bmm1_scale_log2=FakeTensor((2,), "float32")))
    with pytest.raises(InvalidArgument, match="bmm2_scale"):
        run(**call(bmm2_scale="1.0"))


def test_T4_02_tensors_on_the_second_gpu(on_fake: FakeDriver) -> None:
    on_fake.set_current(0)
    run(**call(device=1))
    (launch,) = on_fake.launches
    assert launch.device == 1 and on_fake.current_device == 0


def test_T4_04_first_use_under_capture(on_fake: FakeDriver) -> None:
    stream = decode.current_stream(0)
    on_fake.begin_capture(stream)
    with pytest.raises(NotPrepared):
        run(**call(3))
    assert on_fake.end_capture(stream) == CAPTURE_ACTIVE
    assert on_fake.launches == []


def test_T4_09_batch_beyond_the_grid(on_fake: FakeDriver) -> None:
    run(**call(batch=65535))
    assert on_fake.launches[-1].grid[2] == 65535
    with pytest.raises(Unsupported, match="65536"):
        run(**call(batch=65536))


def test_T4_09_refused_launch_is_an_exception_with_the_facts(on_fake: FakeDriver) -> None:
    run(**call())
    on_fake.fail("cuLaunchKernelEx", 1)
    with pytest.raises(DriverError) as caught:
        run(**call())
    for fact in ("sm90a_decode_bf16_d128_q16", "grid", "device 0", "batch 8"):
        assert fact in str(caught.value)
    assert caught.value.code == 1


def test_T3_06_workspace_is_exact(on_fake: FakeDriver) -> None:
    """As large as workspace_bytes says is enough; half of the scratch is refused before any launch."""
    from fmha_dispatch.device import describe

    problem = dense_problem(q_len=4, kv_len=131072)
    need = workspace_bytes(problem, describe(0))
    assert need > 0
    tables = FakeTensor((1, 131072 // PAGE), "int32")
    long = {"batch": 1, "max_seq_len": 131072, "block_tables": tables}
    run(**call(4, workspace_buffer=FakeTensor((need,), "uint8", ptr=0x7F4000000010), **long))
    on_fake.clear()
    with pytest.raises(InvalidArgument, match="workspace_buffer is too small"):
        run(**call(4, workspace_buffer=FakeTensor((need // 2,), "uint8"), **long))
    assert on_fake.launches == []


@given(
    batch_size=st.integers(1, 300),
    q_len=st.integers(1, 16),
    kv_len=st.integers(1, 200_000),
    heads=st.sampled_from([(8, 8), (64, 8), (96, 8), (32, 1), (7, 7), (16, 4)]),
    window_left=st.sampled_from([-1, 0, 127, 4096]),
)
def test_T3_06_one_bound_holds_for_every_problem(
    batch_size: int, q_len: int, kv_len: int, heads: tuple[int, int], window_left: int
) -> None:
    device = _core.Device(**H200)
    for head_dim in (64, 128, 256):
        problem = dense_decode_problem(
            dtype="bfloat16",
            batch_size=batch_size,
            q_len=q_len,
            kv_len=kv_len,
            num_heads_q=heads[0],
            num_heads_kv=heads[1],
            head_dim=head_dim,
            page_size=16,
            window_left=window_left,
        )
        assert workspace_bytes(problem, device) <= workspace_bound(problem, device)


def test_no_query_rows_is_no_launch(on_fake: FakeDriver) -> None:
    cumulative = FakeTensor((B + 1,), "int32")
    empty = FakeTensor((0, HQ, D))
    ragged = {"q_len_per_req": None, "max_q_len": 4, "cum_seq_lens_q": cumulative}
    assert run(**call(query=empty, **{**ragged, "out": empty})) is empty
    assert on_fake.launches == []


@pytest.mark.parametrize("sm", [100, 103])
def test_trtllm_gen_by_name_on_its_gpus(on_fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, sm: int) -> None:
    """By name only: the decision is NVIDIA's, the cubin the one of its row, the parameters those of its struct."""
    on_fake.set_device(0, sm=sm, sm_count=148)
    asked = []

    def find(path: str) -> VerifiedCubin:
        asked.append(path)
        return tiny_cubin(path.split("/")[1].removesuffix(".cubin"), arch="sm_100f" if "100f" in path else f"sm_{sm}a")

    monkeypatch.setattr(store, "find", find)
    with pytest.raises(Unsupported, match=f"sm_{sm}.*trtllm-gen on sm_100"):
        run(**call())
    run(**call(4, backend="trtllm-gen", window_left=1023))
    (launch,) = on_fake.launches
    (path,) = asked
    assert path.startswith("trtllm-gen/fmhaSm10") and "H128PagedKvSlidingOrChunkedCausalP16" in path
    assert launch.pointer(PTR_LSE) == 0, "the tail of the struct is ours, not NVIDIA's"
    assert launch.integer(WINDOW) == 1024


def test_trtllm_gen_by_name_on_hopper_is_refused(on_fake: FakeDriver) -> None:
    with pytest.raises(Unsupported, match="'trtllm-gen' has no kernels for this GPU; found: sm_90"):
        run(**call(backend="trtllm-gen"))


# --- cubins that are not what the lock says ---


def damaged(data: bytes) -> bytes:
    return data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "one bit": damaged,
    "short": lambda data: data[:-1],
    "long": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "HTML": lambda data: b"<!doctype html><title>Log in</title>",
}


def use_store(monkeypatch: pytest.MonkeyPatch, lock: LockFile, data: Path) -> None:
    stored = store.Store(lock, Settings(offline=True), data=data)
    monkeypatch.setattr(store, "default_store", lambda: stored)


def pack_with(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    shutil.copytree(DATA, folder)
    buffer = io.BytesIO()
    with zipfile.ZipFile(folder / "hopper.zip") as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)))
    (folder / "hopper.zip").write_bytes(buffer.getvalue())
    return folder


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_cubin_never_reaches_the_driver(
    on_fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    use_store(monkeypatch, installed_lock(), pack_with(tmp_path / "data", DAMAGE[kind]))
    with pytest.raises((IntegrityError, FmhaError)) as caught:
        run(**call())
    assert isinstance(caught.value, IntegrityError), caught.value
    assert on_fake.calls("cuLibraryLoadData") == []
    assert on_fake.launches == []


@pytest.mark.parametrize("field, value", [("arch", "sm_100a"), ("symbol", "another_kernel")])
def test_T4_24_cubin_that_is_not_what_the_lock_describes(
    on_fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, field: str, value: str
) -> None:
    """The digest is right and the ELF says something else than the lock: refused, naming both."""
    lock = installed_lock()
    family = lock.families["hopper"]
    changed = [dataclasses.replace(artifact, **{field: value}) for artifact in lock.of_family("hopper")]
    use_store(monkeypatch, lock.replace_family("hopper", family, changed), DATA)
    with pytest.raises(IntegrityError, match=value):
        run(**call())
    assert on_fake.calls("cuLibraryLoadData") == []


def test_T4_24_cubin_of_another_abi(on_fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = installed_lock()
    family = dataclasses.replace(lock.families["hopper"], param_bytes=1408)
    changed = [dataclasses.replace(artifact, param_bytes=1408) for artifact in lock.of_family("hopper")]
    use_store(monkeypatch, lock.replace_family("hopper", family, changed), DATA)
    with pytest.raises(IntegrityError, match="1408") as caught:
        run(**call())
    assert "1280" in str(caught.value)
    assert on_fake.calls("cuLibraryLoadData") == []
