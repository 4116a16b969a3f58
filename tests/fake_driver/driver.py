"""Builds, loads and reads the fake libcuda of this folder.

A process that loads it gets no other: the library bears the SONAME libcuda.so.1, so the extension's dlopen and
cuda-python's find it already there.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MAX_ARGS = 32
CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALIDATED = range(3)


class _Record(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 48),
        ("thread", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("num_args", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("args", ctypes.c_uint64 * MAX_ARGS),
        ("blob", ctypes.c_void_p),
        ("blob_size", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Call:
    """One recorded driver call; `args` are its scalar arguments, `blob` is what it pointed at."""

    name: str
    thread: int
    context: int
    stream: int
    device: int  # of the current context; -1: none
    result: int
    args: tuple[int, ...]
    blob: bytes


@dataclass(frozen=True)
class TensorMap:
    """Arguments of one cuTensorMapEncodeTiled."""

    dtype: int
    rank: int
    addr: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    elem_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2: int
    oob: int


@dataclass(frozen=True)
class Launch:
    """One cuLaunchKernelEx."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem: int
    function: int
    attributes: dict[int, tuple[int, int, int]]  # CUlaunchAttributeID -> value, as three words
    stream: int
    device: int
    result: int
    params: bytes  # the parameters one behind the other; the KernelParams, and for a follower what it takes besides

    @property
    def cluster(self) -> int:
        return self.attributes[4][0]

    @property
    def scheduling_policy(self) -> int:
        return self.attributes[5][0]

    @property
    def pdl(self) -> int:
        return self.attributes[6][0]

    def pointer(self, offset: int) -> int:
        """64-bit field of the KernelParams at `offset`."""
        return int(struct.unpack_from("<Q", self.params, offset)[0])

    def integer(self, offset: int) -> int:
        """32-bit field of the KernelParams at `offset`."""
        return int(struct.unpack_from("<i", self.params, offset)[0])

    def number(self, offset: int) -> float:
        """float32 field of the KernelParams at `offset`."""
        return float(struct.unpack_from("<f", self.params, offset)[0])

    def tensor_map_addr(self, offset: int) -> int:
        """Address that the tensor map in the slot at `offset` was encoded for; 0 for an empty slot."""
        return self.pointer(offset + 8)


def build(folder: Path, *, defines: tuple[str, ...] = ()) -> Path:
    """Compiles the fake into `folder` and returns its path.

    Args:
        defines: ``WITHOUT_LIBRARIES`` leaves out cuLibraryLoadData, as drivers before CUDA 12 do.
    """
    path = folder / "libcuda.so.1"
    command = ["cc", "-std=gnu11", "-O2", "-Wall", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path)]
    command += [f"-D{define}" for define in defines]
    command += [str(HERE / source) for source in ("state.c", "cuda.c", "names.c")] + ["-lpthread", "-ldl"]
    subprocess.run(command, check=True)
    return path


class FakeDriver:
    """The loaded fake: controls and record. `reset` makes it a machine without history."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        self.library.fake_num_records.restype = ctypes.c_size_t
        self.library.fake_record.restype = ctypes.POINTER(_Record)
        self.library.fake_record.argtypes = [ctypes.c_size_t]
        for name in ("fake_context", "fake_new_stream"):
            getattr(self.library, name).restype = ctypes.c_void_p
        for name in ("fake_begin_capture", "fake_end_capture"):
            getattr(self.library, name).argtypes = [ctypes.c_void_p]
        self.reset()

    # What the machine is like.

    def reset(self, num_devices: int = 2) -> None:
        """`num_devices` H200s under a CUDA 13.0 driver, nothing initialised, nothing to fail, an empty record."""
        self.library.fake_reset(num_devices)

    def set_device(
        self, device: int, *, sm: int = 90, sm_count: int = 132, max_smem_bytes: int = 232448, version: int = 13000
    ) -> None:
        self.library.fake_set_device(device, sm // 10, sm % 10, sm_count, max_smem_bytes)
        self.library.fake_set_version(version)

    def set_parameters(self, kernel: str, sizes: tuple[int, ...]) -> None:
        """Bytes of each parameter of `kernel`; without this a kernel takes one KernelParams."""
        self.library.fake_set_parameters(kernel.encode(), len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def fail(self, name: str, code: int, *, skip: int = 0, times: int = 1) -> None:
        """Calls of `name` give `code` after `skip` more that work; `times` -1 is for ever."""
        self.library.fake_fail(name.encode(), code, skip, times)

    def stop_failing(self) -> None:
        self.library.fake_stop_failing()

    def delay(self, name: str, microseconds: int) -> None:
        """Calls of `name` take that long, without holding the fake's lock."""
        self.library.fake_set_delay(name.encode(), ctypes.c_long(microseconds))

    def set_recording(self, on: bool) -> None:
        self.library.fake_set_recording(int(on))

    # Contexts and streams.

    def context(self, device: int) -> int:
        return int(self.library.fake_context(device))

    def new_stream(self, device: int = 0) -> int:
        return int(self.library.fake_new_stream(device))

    def begin_capture(self, stream: int) -> None:
        self.library.fake_begin_capture(stream)

    def end_capture(self, stream: int) -> int:
        """Ends the capture and returns what it had come to, CAPTURE_ACTIVE if it is whole."""
        return int(self.library.fake_end_capture(stream))

    def set_current(self, device: int) -> None:
        """Makes the primary context of `device` current on this thread; -1 for none."""
        self.library.fake_set_current(device)

    @property
    def current_device(self) -> int:
        return int(self.library.fake_current_device())

    def reset_primary_context(self, device: int) -> None:
        self.library.fake_reset_primary(device)

    # The record.

    def clear(self) -> None:
        self.library.fake_clear_records()

    def calls(self, *names: str) -> list[Call]:
        """Calls so far, all or those of `names`, in order."""
        return [call for call in self._calls() if not names or call.name in names]

    def count(self, name: str) -> int:
        return len(self.calls(name))

    @property
    def launches(self) -> list[Launch]:
        return [_launch(call) for call in self.calls("cuLaunchKernelEx")]

    @property
    def tensor_maps(self) -> list[TensorMap]:
        return [_tensor_map(call) for call in self.calls("cuTensorMapEncodeTiled")]

    def _calls(self) -> Iterator[Call]:
        for index in range(self.library.fake_num_records()):
            record = self.library.fake_record(index).contents
            yield Call(
                name=record.name.decode(),
                thread=record.thread,
                context=record.context,
                stream=record.stream,
                device=record.device,
                result=record.result,
                args=tuple(record.args[: record.num_args]),
                blob=ctypes.string_at(record.blob, record.blob_size) if record.blob else b"",
            )


def _launch(call: Call) -> Launch:
    args = call.args
    attributes = {args[at]: (args[at + 1], args[at + 2], args[at + 3]) for at in range(10, 10 + 4 * args[9], 4)}
    return Launch(
        grid=args[0:3],
        block=args[3:6],
        smem=args[6],
        function=args[7],
        attributes=attributes,
        stream=call.stream,
        device=call.device,
        result=call.result,
        params=call.blob,
    )


def _tensor_map(call: Call) -> TensorMap:
    dtype, rank, addr, interleave, swizzle, l2, oob = call.args[:7]
    return TensorMap(
        dtype=dtype,
        rank=rank,
        addr=addr,
        dims=call.args[7 : 7 + rank],
        strides=call.args[12 : 12 + rank - 1],
        box=call.args[16 : 16 + rank],
        elem_strides=call.args[21 : 21 + rank],
        interleave=interleave,
        swizzle=swizzle,
        l2=l2,
        oob=oob,
    )


@functools.cache
def load(path: Path) -> FakeDriver:
    """The fake at `path`; a process has one."""
    return FakeDriver(path)
