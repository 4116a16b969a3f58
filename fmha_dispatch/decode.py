"""The tensor API of paged decode: FlashInfer's function of the same name, over prebuilt kernels."""

from __future__ import annotations

import math
import sys
from typing import Any

from fmha_dispatch.errors import DriverError, InvalidArgument, Unsupported
from fmha_dispatch.kv_cache import paged_kv
from fmha_dispatch.plan import DecodePlan, check_backend
from fmha_dispatch.problem import DecodeTensors, decode_problem, length_bucket
from fmha_dispatch.tensors import TensorView, current_stream, describe_value, dtype_name, empty, is_tensor, view

LOG2_E = math.log2(math.e)

# A serving engine meets a few plans a batch size; past this many the oldest half is forgotten.
MAX_PLANS = 4096

# CUresults of a context that was reset or destroyed: INVALID_CONTEXT, INVALID_HANDLE, CONTEXT_IS_DESTROYED.
CONTEXT_GONE = (201, 400, 709)

_plans: dict[Any, DecodePlan] = {}


def trtllm_batch_decode_with_kv_cache(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    bmm1_scale: float | Any = 1.0,
    bmm2_scale: float | Any = 1.0,
    window_left: int = -1,
    out: Any = None,
    out_dtype: Any = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Any = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Any = None,
    return_lse: bool = False,
    bmm1_scale_log2: Any = None,
    multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: str | None = None,
) -> Any:
    """Attention of a decode (or speculative-decode) batch over a paged KV cache, on the current stream.

    Token t of a request with L_q query tokens and L_kv keys stands at position ``L_kv - L_q + t`` and sees the keys at
    and left of it. A request with ``seq_lens`` 0 gives zeros and LSE -inf. Page ids beyond a request's length are
    never read.

    Args:
        query: ``[sum_seq_lens_q, num_heads_q, head_dim]`` fp16 or bf16; token and head strides are free (multiples of
            16 bytes), so a slice of a packed QKV works.
        kv_cache: pair of ``[num_pages, num_heads_kv, page_size, head_dim]`` (HND) or ``[num_pages, page_size,
            num_heads_kv, head_dim]`` (NHD), or one rank-5 tensor with K and V at dimension 1. Query's dtype. Any
            strides that are multiples of 16 bytes, so one layer of a cross-layer pool works.
        workspace_buffer: contiguous scratch on query's device, any dtype, any content, never shared between streams;
            `fmha_dispatch.workspace_bytes` tells the size.
        block_tables: int32 ``[batch_size, max_pages_per_seq]``; ``[batch_size, 2, max_pages_per_seq]`` (K ids, V ids)
            with ``uses_shared_paged_kv_idx=False``.
        seq_lens: int32 or uint32 ``[batch_size]``, KV lengths with the draft tokens included.
        max_seq_len: bound of ``seq_lens``; decides how the KV is split, never what is computed.
        bmm1_scale: logit scale (q_scale * k_scale / sqrt(head_dim)): a float, or one float32 on the device.
        bmm2_scale: output scale (v_scale): a float, or one float32 on the device.
        window_left: a row sees its own key and ``window_left`` to its left; -1 for all.
        out: contiguous, query's shape; allocated when None.
        out_dtype: dtype of a new ``out``; query's.
        sinks: float32 ``[num_heads_q]`` (or a list of one): ``exp(sink)`` joins each denominator.
        kv_layout: ``HND`` or ``NHD``.
        enable_pdl: programmatic dependent launch; None means on, kernels order every load behind the acquire.
        backend: ``auto`` (sm_90: hopper), ``hopper``, or ``trtllm-gen``: NVIDIA's cubins for sm_100 and sm_103, chosen
            and called as NVIDIA's host code does, never yet run on such a GPU.
        q_len_per_req: query tokens of every request.
        max_q_len: query tokens of the longest request; goes with ``cum_seq_lens_q``.
        cum_seq_lens_q: int32 ``[batch_size + 1]`` running sums for drafts of different lengths (0 allowed).
        uses_shared_paged_kv_idx: whether K and V share page ids (vLLM, FlashInfer) or not (TensorRT-LLM).
        lse: float32 ``[sum_seq_lens_q, num_heads_q]`` to fill: natural logarithm of the softmax denominator.
        return_lse: also return the LSE, allocated when ``lse`` is None.
        bmm1_scale_log2: one float32 on the device, ``bmm1_scale * log2(e)``; replaces ``bmm1_scale``.

    The remaining keywords are FlashInfer's; a value other than the default raises `Unsupported`.

    Returns:
        ``out``, or ``(out, lse)`` with ``return_lse``.

    Raises:
        InvalidArgument: malformed argument.
        Unsupported: no kernel for a well-formed request; the message names the fields and what would work.
        NotPrepared: the kernel is not loaded yet and the stream is being captured.
        ArtifactMissing, IntegrityError: the cubin is absent or damaged.
        DriverError: the driver refused a call.
    """
    if (
        o_sf_scale is not None
        or o_sf_vec_size is not None
        or mask is not None
        or skip_softmax_threshold_scale_factor is not None
        or kv_cache_sf is not None
        or multi_ctas_kv_counter_buffer is not None
        or enable_block_sparse_attention is not False
        or bf16q_fp8kv_transform_mode is not None
        or (o_scale is not None and (type(o_scale) not in (float, int) or o_scale != 1.0))
    ):
        raise _unhonoured(
            o_sf_scale=o_sf_scale,
            o_sf_vec_size=o_sf_vec_size,
            mask=mask,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
            multi_ctas_kv_counter_buffer=multi_ctas_kv_counter_buffer,
            enable_block_sparse_attention=None if enable_block_sparse_attention is False else True,
            bf16q_fp8kv_transform_mode=bf16q_fp8kv_transform_mode,
            o_scale=None if type(o_scale) in (float, int) and o_scale == 1.0 else o_scale,
        )
    if enable_pdl is None:
        enable_pdl = True
    for name, flag in (
        ("enable_pdl", enable_pdl),
        ("return_lse", return_lse),
        ("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx),
    ):
        if type(flag) is not bool:
            raise InvalidArgument(f"{name} is not a bool", found=describe_value(flag))
    if isinstance(sinks, (list, tuple)):
        if len(sinks) != 1:
            raise InvalidArgument(
                "sinks is not one tensor", found=f"a list of {len(sinks)}", fix="float32[num_heads_q]"
            )
        sinks = sinks[0]
    paired = isinstance(kv_cache, (tuple, list))
    caches = tuple(kv_cache) if paired else (kv_cache,)

    # All that decides the plan. Lengths are bucketed: a serving engine's max_seq_len grows by one every step.
    tensors = (query, *caches, workspace_buffer, block_tables, seq_lens, out, sinks, cum_seq_lens_q, lse)
    try:
        key = (
            *map(_signature, tensors),
            paired,
            length_bucket(max_seq_len),
            window_left,
            type(window_left),  # 1 == 1.0 == True
            out_dtype,
            kv_layout,
            backend,
            q_len_per_req,
            type(q_len_per_req),
            max_q_len,
            type(max_q_len),
            uses_shared_paged_kv_idx,
            return_lse,
        )
        plan = _plans.get(key)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # not dense tensors, not ints: checked below
        plan = key = None
    if plan is None:
        plan = _new_plan(
            query,
            kv_cache,
            workspace_buffer,
            block_tables,
            seq_lens,
            out,
            sinks,
            cum_seq_lens_q,
            lse,
            backend=backend,
            kv_layout=kv_layout,
            max_seq_len=max_seq_len,
            window_left=window_left,
            q_len_per_req=q_len_per_req,
            max_q_len=max_q_len,
            out_dtype=out_dtype,
            uses_shared_paged_kv_idx=uses_shared_paged_kv_idx,
            return_lse=return_lse,
        )
        _remember(key, plan)

    if out is None:
        out = empty(tuple(query.shape), plan.out_dtype, query)
    if return_lse and lse is None:
        lse = empty(tuple(query.shape[:2]), "float32", query)
    if plan.launcher is not None:  # None: no query rows, nothing to compute
        if bmm1_scale_log2 is not None:
            scale1, scale1_tensor = 1.0, _device_scale("bmm1_scale_log2", bmm1_scale_log2, plan.device)
        elif type(bmm1_scale) is float:
            scale1, scale1_tensor = bmm1_scale, None
        else:
            scale1, scale1_tensor = _scale("bmm1_scale", bmm1_scale, plan.device)
            if scale1_tensor is not None:
                scale1_tensor = scale1_tensor * LOG2_E  # kernels read the log2-domain value
        if type(bmm2_scale) is float:
            scale2, scale2_tensor = bmm2_scale, None
        else:
            scale2, scale2_tensor = _scale("bmm2_scale", bmm2_scale, plan.device)
        key_ptr = caches[0].data_ptr()
        try:
            plan.launcher.launch(
                query.data_ptr(),
                key_ptr,
                caches[1].data_ptr() if len(caches) == 2 else key_ptr + plan.value_offset,
                out.data_ptr(),
                seq_lens.data_ptr(),
                0 if cum_seq_lens_q is None else cum_seq_lens_q.data_ptr(),
                block_tables.data_ptr(),
                0 if sinks is None else sinks.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                workspace_buffer.data_ptr(),
                plan.workspace_bytes,
                scale1,
                0 if scale1_tensor is None else scale1_tensor.data_ptr(),
                scale2,
                0 if scale2_tensor is None else scale2_tensor.data_ptr(),
                enable_pdl,
                current_stream(plan.device),
            )
        except DriverError as error:
            if error.code in CONTEXT_GONE:
                _plans.pop(key, None)  # the next call makes a plan for the context that there is then
            raise
    return (out, lse) if return_lse else out


def forget_plans() -> None:
    """Drops every cached plan; loaded kernels stay loaded."""
    _plans.clear()


def _signature(tensor: Any) -> Any:
    if tensor is None:
        return None
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device())


def _remember(key: Any, plan: DecodePlan) -> None:
    if key is None:
        return
    if len(_plans) >= MAX_PLANS:
        for old in list(_plans)[: MAX_PLANS // 2]:
            _plans.pop(old, None)
    _plans[key] = plan


def _new_plan(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    out: Any,
    sinks: Any,
    cum_seq_lens_q: Any,
    lse: Any,
    *,
    backend: str,
    kv_layout: str,
    max_seq_len: int,
    out_dtype: Any,
    return_lse: bool,
    **lengths: Any,
) -> DecodePlan:
    """Checks the call, selects, finds, verifies and loads the kernel."""
    check_backend(backend)
    key_cache, value_cache = paged_kv(kv_cache, kv_layout)
    views = DecodeTensors(
        query=view("query", query),
        key=key_cache,
        value=value_cache,
        workspace=view("workspace_buffer", workspace_buffer),
        block_tables=view("block_tables", block_tables),
        seq_lens=view("seq_lens", seq_lens),
        out=_optional("out", out),
        sinks=_optional("sinks", sinks),
        cum_seq_lens_q=_optional("cum_seq_lens_q", cum_seq_lens_q),
        lse=_optional("lse", lse),
    )
    wanted = None if out_dtype is None else dtype_name(out_dtype)
    problem = decode_problem(
        views,
        max_seq_len=max_seq_len,
        out_dtype=wanted,
        will_return_lse=return_lse,
        **lengths,
    )
    return DecodePlan.create(
        problem,
        views.query.device,
        backend=backend,
        stream=current_stream(views.query.device),
        workspace=views.workspace,
        value_offset=value_cache.ptr - key_cache.ptr,
        out_dtype=wanted or views.query.dtype,
    )


def _optional(name: str, tensor: Any) -> TensorView | None:
    return None if tensor is None else view(name, tensor)


def _scale(name: str, value: Any, device: int) -> tuple[float, Any]:
    """(host value, device tensor or None)."""
    if is_tensor(value):
        return 1.0, _device_scale(name, value, device)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value), None
    raise InvalidArgument(f"{name} is neither a finite number nor a tensor", found=describe_value(value))


def _device_scale(name: str, value: Any, device: int) -> Any:
    seen = view(name, value)
    if seen.numel != 1 or seen.dtype != "float32" or seen.device != device:
        raise InvalidArgument(f"{name} cannot be read by the kernel", found=seen, fix=f"float32[1] on cuda:{device}")
    return value


def _unhonoured(**given: Any) -> Unsupported:
    names = [name for name, value in given.items() if value is not None]
    return Unsupported(f"no kernel family honours {', '.join(names)}", fix="leave the keyword at its default")
