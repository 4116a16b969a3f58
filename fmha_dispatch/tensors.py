"""What the dispatcher may know of a tensor, and the two places where torch itself is needed.

Any object with ``data_ptr()``, ``shape``, ``stride()``, ``dtype`` and ``get_device()`` is a tensor here, so that
everything up to the launch runs without torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fmha_dispatch.errors import InvalidArgument, Unsupported

# Bytes per element, by torch's dtype names; two E2M1 values share the byte of a uint8.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

_ATTRIBUTES = ("data_ptr", "shape", "stride", "dtype", "get_device")


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
    return all(hasattr(value, name) for name in _ATTRIBUTES)


def describe_value(value: object) -> str:
    """A few words on a wrong argument, for messages."""
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return f"{type(value).__name__} {value!r}"[:80]


def dtype_name(dtype: object) -> str:
    """``torch.bfloat16`` -> ``bfloat16``; a string passes through."""
    return str(dtype).removeprefix("torch.")


def view(name: str, tensor: Any) -> TensorView:
    """The `TensorView` of a torch tensor (or of anything that looks like one).

    Raises:
        InvalidArgument: not a tensor, or one without strides or memory of its own (sparse, nested, meta).
    """
    if not is_tensor(tensor):
        raise InvalidArgument(f"{name} is not a tensor", found=type(tensor).__name__)
    try:
        return TensorView(
            name,
            dtype_name(tensor.dtype),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.get_device(),
            tensor.data_ptr(),
        )
    except (RuntimeError, TypeError) as error:  # NotImplementedError included
        raise InvalidArgument(
            f"{name} is not a dense tensor", found=str(error).partition("\n")[0], fix="a strided tensor with memory"
        ) from error


def current_stream(device: int) -> int:
    """Handle of torch's current stream on CUDA device `device`."""
    torch = _torch()
    # The raw getter costs 0.1 us; torch.cuda.current_stream() builds an object and costs 4.
    return int(torch._C._cuda_getCurrentRawStream(device))


def empty(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
    """An uninitialised torch tensor of `shape` on the device of `like`."""
    torch = _torch()
    return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)


def _torch() -> Any:
    """torch, imported when first needed; Unsupported without it."""
    try:
        import torch
    except ImportError as error:
        raise Unsupported("the tensor API needs torch", fix="pip install 'fmha-dispatch[torch]'") from error
    return torch
