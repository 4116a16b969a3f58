"""What the dispatcher may know of a tensor, and the two places where torch itself is needed.

Any object with ``data_ptr()``, ``shape``, ``stride()``, ``dtype`` and ``get_device()`` is a tensor here, so that
everything up to the launch runs without torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# Bytes per element; two E2M1 values share the byte of a uint8.
ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
}


class TensorView(NamedTuple):
    """A tensor without its data.

    Attributes:
        name: the argument it came in, for messages.
        dtype: torch's name without ``torch.``, such as ``bfloat16``.
        shape: sizes.
        strides: in elements.
        device: CUDA ordinal; -1 for anything that is not on a CUDA device.
        ptr: address of the first element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    ptr: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def contiguous(self) -> bool:
        """Whether the elements are dense in row-major order; strides of size-1 dimensions do not matter."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def __str__(self) -> str:
        where = f"cuda:{self.device}" if self.device >= 0 else "not on a CUDA device"
        return f"{self.name} {self.dtype}{list(self.shape)} strides {list(self.strides)} {where}"


def is_tensor(value: object) -> bool:
    """Whether `value` can be viewed as a tensor."""
    return hasattr(value, "data_ptr") and hasattr(value, "stride")


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` -> ``bfloat16``; a string passes through."""
    return str(dtype).removeprefix("torch.")


def view(name: str, tensor: Any) -> TensorView:
    """The `TensorView` of a torch tensor (or of anything that looks like one)."""
    return TensorView(
        name,
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.get_device(),
        tensor.data_ptr(),
    )


def current_stream(device: int) -> int:
    """Handle of torch's current stream on CUDA device `device`."""
    import torch

    # The raw getter costs 0.1 us; torch.cuda.current_stream() builds an object and costs 4.
    return int(torch._C._cuda_getCurrentRawStream(device))


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """An uninitialised torch tensor of `shape` on the device of `like`."""
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
