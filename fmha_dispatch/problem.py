"""From the arguments of a decode call to a `_core.Problem`: every check that needs no GPU. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from fmha_dispatch import _core
from fmha_dispatch.errors import InvalidArgument, Unsupported
from fmha_dispatch.tensors import TensorView, describe_value

# torch names of the dtypes that KernelParams and the manifest can express. uint8 holds two E2M1 values.
DATA_TYPES = {
    "float16": _core.DataType.FP16,
    "bfloat16": _core.DataType.BF16,
    "float8_e4m3fn": _core.DataType.E4M3,
}

MAX_INT32 = 2**31 - 1

# Length tensors: a kernel reads 32-bit words, the sign is never set.
LENGTH_DTYPES = ("int32", "uint32")


@dataclass(frozen=True)
class DecodeTensors:
    """The tensors of one paged decode call.

    Shapes: query and out ``[sum_seq_lens_q, num_heads_q, head_dim]``; key and value
    ``[num_pages, num_heads_kv, page_size, head_dim]`` whatever their memory order; block_tables
    ``[batch_size, max_pages_per_seq]``, or ``[batch_size, 2, max_pages_per_seq]`` when K and V have page ids of their
    own; seq_lens ``[batch_size]``; cum_seq_lens_q ``[batch_size + 1]``; sinks ``[num_heads_q]``; lse
    ``[sum_seq_lens_q, num_heads_q]``.
    """

    query: TensorView
    key: TensorView
    value: TensorView
    block_tables: TensorView
    seq_lens: TensorView
    workspace: TensorView
    out: TensorView | None = None
    cum_seq_lens_q: TensorView | None = None
    sinks: TensorView | None = None
    lse: TensorView | None = None

    def present(self) -> list[TensorView]:
        """Every tensor that was given, query first."""
        fields = (
            self.query,
            self.key,
            self.value,
            self.block_tables,
            self.seq_lens,
            self.workspace,
            self.out,
            self.cum_seq_lens_q,
            self.sinks,
            self.lse,
        )
        return [tensor for tensor in fields if tensor is not None]


def length_bucket(max_seq_len: int) -> int:
    """`max_seq_len` rounded up to 8 steps an octave (64 tokens at least), so that plans are few.

    An engine's longest request grows by a token a step. The value only decides how KV is split; kernels take the true
    lengths from ``seq_lens``.

    Raises:
        ValueError: negative length.
    """
    if max_seq_len < 0:
        raise ValueError("max_seq_len is negative")
    step = max(64, 1 << max((max_seq_len - 1).bit_length() - 4, 0))
    return min(-(-max_seq_len // step) * step, MAX_INT32)  # engines pass INT32_MAX for "unknown"


def decode_problem(
    tensors: DecodeTensors,
    *,
    max_seq_len: int,
    window_left: int = -1,
    q_len_per_req: int | None = 1,
    max_q_len: int | None = None,
    out_dtype: str | None = None,
    uses_shared_paged_kv_idx: bool = True,
    will_return_lse: bool = False,
) -> _core.Problem:
    """Checks a decode call and states it as a `_core.Problem`.

    Args:
        tensors: views of every tensor given.
        max_seq_len: length of the longest request's KV, drafts included; the launch is split for its `length_bucket`.
        window_left: keys visible left of a row's own position; -1 for all.
        q_len_per_req: query tokens of every request; ignored when ``tensors.cum_seq_lens_q`` is given.
        max_q_len: query tokens of the longest request; needed with ``cum_seq_lens_q``.
        out_dtype: wanted output dtype; None takes that of out, else of query.
        uses_shared_paged_kv_idx: False for TensorRT-LLM tables ``[batch_size, 2, max_pages_per_seq]``.
        will_return_lse: an LSE is wanted although ``tensors.lse`` is not given.

    Raises:
        InvalidArgument: a malformed argument, with what was asked, found, and would work.
        Unsupported: a dtype that no manifest row can express.
    """
    query, key, value = tensors.query, tensors.key, tensors.value
    _check_devices(tensors)
    _check_rank(query, 3, "[sum of query tokens, num_heads_q, head_dim]")
    _check_inner_stride(query)
    dtype_q, dtype_k = _data_type(query), _data_type(key)
    if value.dtype != key.dtype:
        raise InvalidArgument("K and V differ in dtype", asked=key, found=value, fix="one dtype for both caches")
    if value.shape != key.shape:
        raise InvalidArgument("K and V differ in shape", asked=key, found=value, fix="one shape for both caches")
    _check_inner_stride(key)
    _check_inner_stride(value)

    sum_seq_lens_q, num_heads_q, head_dim = query.shape
    num_pages, num_heads_kv, page_size, head_dim_kv = key.shape
    if head_dim != head_dim_kv:
        raise InvalidArgument("query and kv_cache differ in head_dim", asked=query, found=key)
    if 0 in (num_heads_q, num_heads_kv, head_dim, page_size):
        raise InvalidArgument("a dimension is empty", found=f"{query}; {key}")
    if num_heads_q % num_heads_kv:
        raise InvalidArgument(
            "num_heads_q is not a multiple of num_heads_kv",
            asked=f"{num_heads_q} query heads",
            found=f"{num_heads_kv} KV heads",
        )

    ragged, batch_size, max_seq_len_q = _query_lengths(tensors, q_len_per_req, max_q_len)
    max_pages_per_seq = _check_block_tables(tensors.block_tables, batch_size, uses_shared_paged_kv_idx)
    _check_vector(tensors.seq_lens, batch_size, LENGTH_DTYPES, "one KV length for each request")
    if tensors.sinks is not None:
        _check_sinks(tensors.sinks, num_heads_q)
    if tensors.lse is not None:
        _check_output(tensors.lse, (sum_seq_lens_q, num_heads_q), "float32")
    wanted = out_dtype or (tensors.out.dtype if tensors.out is not None else query.dtype)
    if tensors.out is not None:
        _check_output(tensors.out, query.shape, wanted)
    if not tensors.workspace.contiguous:
        raise InvalidArgument("workspace_buffer is not contiguous", found=tensors.workspace)
    _check_int("max_seq_len", max_seq_len, 0)
    _check_int("window_left", window_left, -1, "-1 turns the window off")

    return _core.Problem(
        dtype_q=dtype_q,
        dtype_k=dtype_k,
        dtype_v=dtype_k,
        dtype_o=_out_data_type(wanted),
        layout=_core.QkvLayout.PagedKv,
        batch_size=batch_size,
        max_seq_len_q=max_seq_len_q,
        max_seq_len_kv=max(length_bucket(max_seq_len), 1),
        sum_seq_lens_q=sum_seq_lens_q,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        page_size=page_size,
        num_pages_k=num_pages,
        num_pages_v=num_pages,
        max_pages_per_seq=max_pages_per_seq,
        window_left=window_left,
        uses_shared_paged_kv_idx=uses_shared_paged_kv_idx,
        ragged_q=ragged,
        has_sinks=tensors.sinks is not None,
        has_lse=will_return_lse or tensors.lse is not None,
        stride_q_token=query.strides[0],
        stride_q_head=query.strides[1],
        stride_k_token=key.strides[2],
        stride_k_head=key.strides[1],
        stride_k_page=key.strides[0],
        stride_v_token=value.strides[2],
        stride_v_head=value.strides[1],
        stride_v_page=value.strides[0],
    )


def dense_decode_problem(
    *,
    dtype: str,
    batch_size: int,
    q_len: int,
    kv_len: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    page_size: int,
    device: int = 0,
    window_left: int = -1,
    sinks: bool = False,
    lse: bool = False,
) -> _core.Problem:
    """The problem of a decode batch of `batch_size` equal requests over a contiguous HND cache, without tensors.

    For planning ahead (`workspace_bytes`, ``fmha-dispatch explain``) from a model's numbers alone.

    Raises:
        InvalidArgument, Unsupported: as `decode_problem`.
    """
    pages_per_seq = -(-max(kv_len, 1) // max(page_size, 1))
    rows = batch_size * q_len
    query = _dense("query", dtype, (rows, num_heads_q, head_dim), device)
    cache = _dense("kv_cache", dtype, (batch_size * pages_per_seq, num_heads_kv, page_size, head_dim), device)
    return decode_problem(
        DecodeTensors(
            query=query,
            key=cache,
            value=cache,
            block_tables=_dense("block_tables", "int32", (batch_size, pages_per_seq), device),
            seq_lens=_dense("seq_lens", "int32", (batch_size,), device),
            workspace=_dense("workspace_buffer", "uint8", (0,), device),
            sinks=_dense("sinks", "float32", (num_heads_q,), device) if sinks else None,
        ),
        max_seq_len=kv_len,
        window_left=window_left,
        q_len_per_req=q_len,
        will_return_lse=lse,
    )


def _dense(name: str, dtype: str, shape: tuple[int, ...], device: int) -> TensorView:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorView(name, dtype, shape, tuple(reversed(strides)), device, 0)


def _query_lengths(tensors: DecodeTensors, q_len_per_req: int | None, max_q_len: int | None) -> tuple[bool, int, int]:
    """(ragged, batch_size, max_seq_len_q)."""
    if tensors.cum_seq_lens_q is not None:
        if max_q_len is None:
            raise InvalidArgument("cum_seq_lens_q needs max_q_len", fix="pass the longest query length of the batch")
        _check_int("max_q_len", max_q_len, 1)
        # FlashInfer's default of q_len_per_req is 1, so 1 beside cum_seq_lens_q only means that it was not given.
        if q_len_per_req not in (None, 1):
            raise InvalidArgument(
                "q_len_per_req and cum_seq_lens_q exclude each other", asked=f"q_len_per_req={q_len_per_req}"
            )
        if len(tensors.cum_seq_lens_q.shape) != 1 or tensors.cum_seq_lens_q.shape[0] < 1:
            raise InvalidArgument(
                "cum_seq_lens_q has the wrong shape", found=tensors.cum_seq_lens_q, fix="[batch_size + 1]"
            )
        batch_size = tensors.cum_seq_lens_q.shape[0] - 1
        _check_vector(tensors.cum_seq_lens_q, batch_size + 1, LENGTH_DTYPES, "[batch_size + 1] running sums")
        return True, batch_size, max_q_len
    if max_q_len is not None and max_q_len != q_len_per_req:
        raise InvalidArgument(
            "max_q_len needs cum_seq_lens_q",
            asked=f"max_q_len={max_q_len!r}, q_len_per_req={q_len_per_req!r}",
            fix="pass cum_seq_lens_q, or q_len_per_req for drafts of one length",
        )
    if q_len_per_req is None:
        raise InvalidArgument(
            "the query lengths are not given", fix="pass q_len_per_req, or max_q_len with cum_seq_lens_q"
        )
    _check_int("q_len_per_req", q_len_per_req, 1)
    if tensors.query.shape[0] % q_len_per_req:
        raise InvalidArgument(
            "query rows are not a multiple of q_len_per_req",
            asked=f"q_len_per_req={q_len_per_req}",
            found=tensors.query,
        )
    return False, tensors.query.shape[0] // q_len_per_req, q_len_per_req


def _check_block_tables(tables: TensorView, batch_size: int, shared: bool) -> int:
    """Returns the row pitch in page ids, which may exceed the columns that a sliced table shows."""
    expected = "[batch_size, max_pages_per_seq]" if shared else "[batch_size, 2, max_pages_per_seq]"
    if tables.dtype != "int32":
        raise InvalidArgument("block_tables has the wrong dtype", found=tables, fix="int32")
    if (
        len(tables.shape) != (2 if shared else 3)
        or tables.shape[0] != batch_size
        or (not shared and tables.shape[1] != 2)
    ):
        raise InvalidArgument(
            "block_tables has the wrong shape",
            asked=f"batch_size {batch_size}, uses_shared_paged_kv_idx={shared}",
            found=tables,
            fix=f"int32 {expected}",
        )
    width = tables.shape[-1]
    if width == 0:
        raise InvalidArgument("block_tables has no columns", found=tables, fix="at least one page a request")
    pitch = tables.strides[-2] if tables.shape[-2] > 1 else width
    inner_ok = width == 1 or tables.strides[-1] == 1
    outer_ok = shared or batch_size == 1 or tables.strides[0] == 2 * pitch
    if not inner_ok or not outer_ok or pitch < width:
        raise InvalidArgument(
            "block_tables rows are not dense", found=tables, fix="ids of a row side by side, rows at one pitch"
        )
    return pitch


def _check_devices(tensors: DecodeTensors) -> None:
    device = tensors.query.device
    for tensor in tensors.present():
        if tensor.device < 0:
            raise InvalidArgument(
                f"{tensor.name} is not on a CUDA device", found=tensor, fix="move it to query's device"
            )
        if tensor.device != device:
            raise InvalidArgument(
                f"{tensor.name} is on another device than query", asked=f"cuda:{device}", found=f"cuda:{tensor.device}"
            )


def _check_rank(tensor: TensorView, rank: int, axes: str) -> None:
    if len(tensor.shape) != rank:
        raise InvalidArgument(f"{tensor.name} has the wrong rank", found=tensor, fix=f"rank {rank}: {axes}")


def _check_inner_stride(tensor: TensorView) -> None:
    if tensor.shape[-1] != 1 and tensor.strides[-1] != 1:
        raise InvalidArgument(
            f"{tensor.name} has gaps along head_dim", found=tensor, fix="stride 1 in the last dimension"
        )


def _check_vector(tensor: TensorView, length: int, dtypes: tuple[str, ...], what: str) -> None:
    if tensor.shape != (length,) or tensor.dtype not in dtypes or not tensor.contiguous:
        raise InvalidArgument(
            f"{tensor.name} is not {what}", found=tensor, fix=f"contiguous {' or '.join(dtypes)}[{length}]"
        )


def _check_sinks(sinks: TensorView, num_heads_q: int) -> None:
    if sinks.dtype != "float32" or sinks.numel != num_heads_q or not sinks.contiguous:
        raise InvalidArgument(
            "sinks is not one value for each query head", found=sinks, fix=f"contiguous float32[{num_heads_q}]"
        )


def _check_output(tensor: TensorView, shape: tuple[int, ...], dtype: str) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.contiguous:
        raise InvalidArgument(f"{tensor.name} cannot be written", found=tensor, fix=f"contiguous {dtype}{list(shape)}")


def _check_int(name: str, value: object, low: int, note: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"{name} is not an int", found=describe_value(value))
    if not low <= value <= MAX_INT32:
        fix = f"{low} <= {name} < 2^31" + (f" ({note})" if note else "")
        raise InvalidArgument(f"{name} is out of range", found=value, fix=fix)


def _data_type(tensor: TensorView) -> _core.DataType:
    known = DATA_TYPES.get(tensor.dtype)
    if known is None:
        raise Unsupported(f"no kernel reads {tensor.name} of this dtype", found=tensor, fix=", ".join(DATA_TYPES))
    return known


def _out_data_type(dtype: str) -> _core.DataType:
    known = DATA_TYPES.get(dtype)
    if known is None:
        raise Unsupported("no kernel writes this out_dtype", asked=dtype, fix=", ".join(DATA_TYPES))
    return known
