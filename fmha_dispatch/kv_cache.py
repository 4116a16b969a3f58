"""Paged KV caches as callers hold them, seen as key and value tensors with one order of dimensions."""

from __future__ import annotations

from typing import Any

from fmha_dispatch.errors import InvalidArgument
from fmha_dispatch.tensors import ITEM_BYTES, TensorView, describe_value, is_tensor, view


def paged_kv(kv_cache: Any, kv_layout: str) -> tuple[TensorView, TensorView]:
    """Key and value views ``[num_pages, num_heads_kv, page_size, head_dim]`` of a paged cache.

    Args:
        kv_cache: a pair of rank-4 tensors, or one rank-5 tensor ``[num_pages, 1 or 2, ...]``; with 1, K and V are the
            same memory.
        kv_layout: ``HND`` (``[..., num_heads_kv, page_size, head_dim]``) or ``NHD`` (heads and tokens exchanged).

    Raises:
        InvalidArgument: anything else.
    """
    if kv_layout not in ("HND", "NHD"):
        raise InvalidArgument("kv_layout is unknown", asked=repr(kv_layout), fix="HND or NHD")
    if isinstance(kv_cache, (tuple, list)):
        if len(kv_cache) != 2 or not all(is_tensor(part) for part in kv_cache):
            raise InvalidArgument(
                "kv_cache is not a pair of tensors", found=describe_value(kv_cache), fix="pass (key_cache, value_cache)"
            )
        key, value = view("kv_cache[0]", kv_cache[0]), view("kv_cache[1]", kv_cache[1])
    elif is_tensor(kv_cache):
        both = view("kv_cache", kv_cache)
        if len(both.shape) != 5 or both.shape[1] not in (1, 2):
            raise InvalidArgument(
                "a single kv_cache tensor has rank 5 with 1 or 2 at dimension 1",
                found=both,
                fix=f"[num_pages, 1 or 2, {_kv_axes(kv_layout)}], or a pair of rank-4 tensors",
            )
        offset = (both.shape[1] - 1) * both.strides[1] * ITEM_BYTES.get(both.dtype, 1)
        shape, strides = both.shape[:1] + both.shape[2:], both.strides[:1] + both.strides[2:]
        key = both._replace(name="kv_cache[:, 0]", shape=shape, strides=strides)
        value = key._replace(name=f"kv_cache[:, {both.shape[1] - 1}]", ptr=both.ptr + offset)
    else:
        raise InvalidArgument("kv_cache is not a tensor or a pair of tensors", found=describe_value(kv_cache))
    for part in (key, value):
        if len(part.shape) != 4:
            raise InvalidArgument(
                f"{part.name} has the wrong rank", found=part, fix=f"rank 4: [num_pages, {_kv_axes(kv_layout)}]"
            )
    if kv_layout == "NHD":
        key, value = _swap_heads_and_tokens(key), _swap_heads_and_tokens(value)
    return key, value


def _swap_heads_and_tokens(tensor: TensorView) -> TensorView:
    n, t, h, d = tensor.shape
    sn, st, sh, sd = tensor.strides
    return tensor._replace(shape=(n, h, t, d), strides=(sn, sh, st, sd))


def _kv_axes(kv_layout: str) -> str:
    return "num_heads_kv, page_size, head_dim" if kv_layout == "HND" else "page_size, num_heads_kv, head_dim"
