"""Verified cubins into the driver: once for each kernel and device, before any launch, never during graph capture."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fmha_dispatch import _core
from fmha_dispatch.device import OpenDevice, bindings, call, driver, open_device
from fmha_dispatch.errors import DeviceError, DriverError, IntegrityError, NotPrepared

if TYPE_CHECKING:
    from fmha_dispatch.cubin import VerifiedCubin

_lock = threading.Lock()
_loaded: dict[tuple[int, str, str], LoadedKernel] = {}


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel ready to be launched on one device. Stays loaded until the process ends: graphs may hold it.

    Attributes:
        name: the cubin's path in the lock.
        function: what a launch takes: the ``CUkernel``, which unlike a ``CUfunction`` survives a reset of the context.
        context: the primary ``CUcontext`` that it belongs to.
        context_id: identity of the context.
        device: CUDA ordinal.
        load_seconds: time that the driver took.
        device_bytes: device memory that loading took; 0 if the driver does not tell.
    """

    name: str
    function: int
    context: int
    context_id: int
    device: int
    load_seconds: float
    device_bytes: int


def load(
    cubin: VerifiedCubin, device: int, *, stream: int | None = None, param_bytes: int = _core.KERNEL_PARAMS_BYTES
) -> LoadedKernel:
    """Loads `cubin` on GPU `device`, or returns what an earlier call loaded.

    Args:
        cubin: bytes that passed every check; they are handed to the driver from memory.
        device: CUDA ordinal.
        stream: the ``CUstream`` that the launch will use, so that loading under its capture is refused.
        param_bytes: size of the parameters that the launch will pass.

    Raises:
        NotPrepared: `stream` is being captured; nothing was called that capture forbids.
        IntegrityError: the cubin's parameter size is not this library's.
        DeviceError: no driver, no such GPU, a GPU that cannot run the cubin, or a forked process.
        DriverError: the driver refused.
    """
    opened = open_device(device)
    key = (device, cubin.sha256, cubin.symbol)
    with _lock:
        kernel = _loaded.get(key)
        if kernel is not None and kernel.context_id == opened.context_id:
            return kernel
        if not runs_on(cubin.arch, opened.properties.sm):
            raise DeviceError(
                "the cubin is for another GPU",
                asked=f"{cubin.name}, {cubin.arch}",
                found=f"cuda:{device} is sm_{opened.properties.sm}",
            )
        if cubin.param_bytes != param_bytes:
            raise IntegrityError(
                "the cubin was built for other parameters",
                asked=f"{param_bytes} bytes",
                found=f"{cubin.param_bytes} bytes in {cubin.name}",
                fix="install the fmha-dispatch version that its cubins.lock belongs to",
            )
        with _current(opened.context):
            if stream is not None and driver().is_capturing(stream):
                raise NotPrepared(
                    "a kernel would have to be loaded while the stream is being captured",
                    asked=f"{cubin.name} on cuda:{device}",
                    fix="prepare() it, or call once outside the capture",
                )
            _loaded[key] = kernel = _load(cubin, opened)
        return kernel


def loaded(device: int, sha256: str, symbol: str) -> LoadedKernel | None:
    """What `load` would return for such a cubin without loading anything, if it is loaded.

    Raises:
        DeviceError: as `load`.
    """
    opened = open_device(device)
    kernel = _loaded.get((device, sha256, symbol))
    return kernel if kernel is not None and kernel.context_id == opened.context_id else None


def runs_on(arch: str, sm: int) -> bool:
    """Whether code for `arch` runs on a GPU of compute capability `sm` (major * 10 + minor).

    ``sm_90a`` runs on 9.0 alone; ``sm_100f`` and ``sm_80`` on their own and later minors of the same major.
    """
    parsed = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if parsed is None:
        return False
    built, kind = int(parsed[1]), parsed[2]
    return built == sm if kind == "a" else built // 10 == sm // 10 and built <= sm


def _load(cubin: VerifiedCubin, device: OpenDevice) -> LoadedKernel:
    started = time.perf_counter()
    doing = f"loading {cubin.name} ({cubin.arch}, {len(cubin.data)} bytes) on cuda:{device.ordinal}"
    facts = {"found": _facts(cubin, device)}
    with contextlib.ExitStack() as undo:
        with _relaxed_capture():
            free_before = _free_bytes()
            library = call("cuLibraryLoadData", cubin.data, [], [], 0, [], [], 0, doing=doing, **facts)
            undo.callback(bindings().cuLibraryUnload, library)
            try:
                kernel = _kernel(library, cubin, device, doing, facts)
                free_after = _free_bytes()
            except BaseException:
                undo.close()  # while unloading cannot break another thread's capture
                raise
        undo.pop_all()
    device_bytes = 0 if free_before is None or free_after is None else max(0, free_before - free_after)
    return LoadedKernel(
        name=cubin.name,
        function=int(kernel),
        context=device.context,
        context_id=device.context_id,
        device=device.ordinal,
        load_seconds=time.perf_counter() - started,
        device_bytes=device_bytes,
    )


def _kernel(library: Any, cubin: VerifiedCubin, device: OpenDevice, doing: str, facts: dict[str, str]) -> Any:
    """The entry point, allowed all the shared memory and cluster sizes of the device, and resident on it."""
    attributes = bindings().CUfunction_attribute
    kernel = call("cuLibraryGetKernel", library, cubin.symbol.encode(), doing=f"{doing}: {cubin.symbol}", **facts)
    static_smem = call(
        "cuKernelGetAttribute", attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel, device.ordinal, doing=doing
    )
    limits = {
        attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: (
            device.properties.max_smem_bytes - int(static_smem)
        ),
        attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: 1,
    }
    for limit, value in limits.items():
        raising = f"{doing}: {limit.name} {value}"
        call("cuKernelSetAttribute", limit, value, kernel, device.ordinal, doing=raising, **facts)
    # Under lazy loading the code would else reach the GPU at the first launch, which may be a captured one.
    function = call("cuKernelGetFunction", kernel, doing=doing, **facts)
    call("cuFuncLoad", function, doing=doing, **facts)
    return kernel


def _facts(cubin: VerifiedCubin, device: OpenDevice) -> str:
    return (
        f"{cubin.arch} code, sha256 {cubin.sha256} (file is intact), on sm_{device.properties.sm} with a driver for "
        f"CUDA {driver().version() // 1000}.{driver().version() % 1000 // 10}"
    )


def _free_bytes() -> int | None:
    """Free memory of the current device; None if the driver does not tell, which is no reason not to load."""
    try:
        return int(call("cuMemGetInfo", doing="asking for free memory"))
    except DriverError:
        return None


@contextlib.contextmanager
def _current(context: int) -> Iterator[None]:
    """Makes `context` current; the caller's is restored in any case."""
    call("cuCtxPushCurrent", context, doing="making the device current")
    try:
        yield
    finally:
        call("cuCtxPopCurrent", doing="restoring the current device")


@contextlib.contextmanager
def _relaxed_capture() -> Iterator[None]:
    """Lets this thread load while another thread captures in global mode, which would else break the capture there."""
    mode = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", mode, doing="loading a kernel")
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before, doing="loading a kernel")
