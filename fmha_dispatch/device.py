"""GPUs as the driver describes them. The first call initialises the driver; importing this module does not."""

from __future__ import annotations

import functools
import os
import re
import threading
from dataclasses import dataclass
from typing import Any

from fmha_dispatch import _core
from fmha_dispatch.errors import DeviceError, DriverError

# Largest cluster that every kernel may have without asking; more needs the non-portable attribute and idle GPCs.
PORTABLE_CLUSTER_SIZE = 8

_lock = threading.Lock()
_opened: dict[int, OpenDevice] = {}
_initialised_by: int | None = None  # the process that called cuInit: nothing of the driver survives a fork


@dataclass(frozen=True)
class OpenDevice:
    """A GPU whose primary context this process holds.

    Attributes:
        ordinal: CUDA ordinal.
        name: marketing name.
        context: the primary ``CUcontext``.
        context_id: its identity; another one after a reset of the context.
        properties: what the selector may know.
    """

    ordinal: int
    name: str
    context: int
    context_id: int
    properties: _core.Device


@functools.cache
def driver() -> _core.Driver:
    """The process's CUDA driver, opened on first use; no driver call is made.

    Raises:
        DeviceError: no driver on this machine, or one that is too old.
    """
    return _core.Driver()


def bindings() -> Any:
    """`cuda.bindings.driver`, which finds the library that `driver` has opened. Costs 50 ms the first time."""
    driver()
    from cuda.bindings import driver as cuda

    return cuda


def call(name: str, *arguments: Any, doing: str, **facts: object) -> Any:
    """Calls driver function `name` through cuda-python and returns its value, if any.

    Args:
        doing: what the call is for, for the error.
        facts: more fields of the error (``found``, ``fix``).

    Raises:
        DriverError: the driver refused.
    """
    try:
        result, *values = getattr(bindings(), name)(*arguments)
        code = int(result)
    except ValueError as error:  # cuda-python raises this for a CUresult that is newer than itself
        unknown = re.match(r"(\d+) is not a valid CUresult", str(error))
        if unknown is None:
            raise
        code, values = int(unknown[1]), []
    if code != 0:
        facts.setdefault("fix", _core.driver_error_cause(code) or None)
        message = f"{name} failed: {driver().error_name(code)} ({code})"
        raise DriverError(message, code=code, call=name, asked=doing, **facts)
    return values[0] if values else None


def open_device(ordinal: int) -> OpenDevice:
    """Initialises the driver and retains the primary context of GPU `ordinal`; cheap when done before.

    Raises:
        DeviceError: no driver, no such GPU, or a forked process.
        DriverError: the driver refused.
    """
    # Before any lock: one that another thread held during the fork stays held for ever, here and in the loader.
    if _initialised_by not in (None, os.getpid()):
        raise DeviceError(
            "this process was forked after CUDA was initialised",
            found=f"process {_initialised_by} initialised it",
            fix="start workers with the spawn or forkserver method, or fork before the first GPU call",
        )
    with _lock:
        known = _opened.get(ordinal)
        if known is not None:
            code, context_id = bindings().cuCtxGetId(known.context)
            if code == 0 and int(context_id) == known.context_id:
                return known
        _opened[ordinal] = opened = _open(ordinal)
        return opened


def describe(ordinal: int) -> _core.Device:
    """What the selector may know of GPU `ordinal`.

    Raises:
        DeviceError: no driver, no such GPU.
    """
    return open_device(ordinal).properties


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


# For a fork between taking the lock and calling cuInit, after which the child may still use the driver.
os.register_at_fork(after_in_child=_new_lock)


def _initialise() -> None:
    global _initialised_by
    before, _initialised_by = _initialised_by, os.getpid()
    try:
        call("cuInit", 0, doing="initialising the driver")
    except DriverError:
        _initialised_by = before
        raise


def _open(ordinal: int) -> OpenDevice:
    cuda = bindings()
    _initialise()
    count = call("cuDeviceGetCount", doing="counting GPUs")
    if not 0 <= ordinal < count:
        raise DeviceError("no such GPU", asked=f"cuda:{ordinal}", found=f"{count} GPU(s)")
    handle = call("cuDeviceGet", ordinal, doing=f"opening cuda:{ordinal}")
    attributes = cuda.CUdevice_attribute

    def attribute(which: Any) -> int:
        return int(call("cuDeviceGetAttribute", which, handle, doing=f"describing cuda:{ordinal}"))

    major = attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
    minor = attribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    properties = _core.Device(
        sm=major * 10 + minor,
        sm_count=attribute(attributes.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        max_smem_bytes=attribute(attributes.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        max_cluster_size=PORTABLE_CLUSTER_SIZE,
    )
    name = call("cuDeviceGetName", 128, handle, doing=f"naming cuda:{ordinal}")
    context = call("cuDevicePrimaryCtxRetain", handle, doing=f"retaining the primary context of cuda:{ordinal}")
    context_id = call("cuCtxGetId", context, doing=f"identifying the primary context of cuda:{ordinal}")
    return OpenDevice(ordinal, name.split(b"\0", 1)[0].decode(), int(context), int(context_id), properties)
