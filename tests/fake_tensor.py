"""A tensor without data or torch: the attributes that fmha_dispatch reads, and nothing else."""

from __future__ import annotations


class FakeTensor:
    """`dtype` is torch's name without ``torch.``; `device` a CUDA ordinal, -1 for the CPU."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str = "bfloat16",
        *,
        strides: tuple[int, ...] | None = None,
        device: int = 0,
        ptr: int = 0x7F0000000000,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._strides = strides or dense_strides(self.shape)
        self._device = device
        self._ptr = ptr

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def get_device(self) -> int:
        return self._device

    def data_ptr(self) -> int:
        return self._ptr


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
