"""A call of NVIDIA's launcher functions, recorded as JSON, in the dispatcher's terms.

Argument names are the launcher's. A tensor is ``{ptr, dtype, shape, strides}``: device address as a hex string, torch
dtype name, sizes and strides in elements of that dtype (``uint8``: two FP4 values). Nothing touches a device.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fmha_dispatch._core import Buffers, DataType, Device, KernelType, MaskType, Problem, QkvLayout, SparseMlaType
from fmha_dispatch.errors import Unsupported

DATA_TYPES = {
    "float32": DataType.FP32,
    "float16": DataType.FP16,
    "bfloat16": DataType.BF16,
    "float8_e4m3fn": DataType.E4M3,
    "float8_e5m2": DataType.E5M2,
    "int8": DataType.INT8,
    "uint8": DataType.E2M1,
}
# What the launcher's runner can be made for, in the order in which it is checked.
RUNNER_DATA_TYPES = {
    "q": (DataType.E4M3, DataType.FP16, DataType.BF16, DataType.INT8),
    "k": (DataType.E4M3, DataType.FP16, DataType.BF16, DataType.INT8, DataType.E2M1),
    "v": (DataType.E4M3, DataType.E2M1, DataType.FP16, DataType.BF16),
    "o": (DataType.E4M3, DataType.FP16, DataType.BF16, DataType.E2M1),
}
RUNNER_SM = (100, 103)
MAX_SMEM_BYTES = 232448  # a block's opt-in limit on both
MAX_CLUSTER_SIZE = 16

# (head_dim_qk, head_dim_v) of multi-head latent attention.
MLA_HEAD_DIMS = ((576, 512), (320, 256))
SPARSE_MLA_HEAD_DIMS = (*MLA_HEAD_DIMS, (512, 512))

COUNTER_BYTES = 8192 * 256 * 4
SOFTMAX_STATS_BYTES = 8
SOFTMAX_GUARD_BYTES = 1 << 20
WORKSPACE_ALIGNMENT = 16

Args = Mapping[str, Any]
Tensor = Mapping[str, Any]


class CallRefused(Unsupported):
    """The launcher refuses the call before any kernel is looked for.

    Attributes:
        category: the word by which recorded expectations class it.
    """

    def __init__(self, category: str, message: str) -> None:
        self.category = category
        super().__init__(message)


@dataclass
class RecordedCall:
    """What the selector and the parameter writer take, and what only the launch itself takes.

    Attributes:
        function: of the launcher: ``decode``, ``context`` or ``ragged``.
        lse_strides: (token, head) of the LSE tensor in elements.
        scratch_bytes: what the workspace has left for partial results.
    """

    function: str
    device: Device
    stream: int
    enable_pdl: bool
    problem: Problem = field(default_factory=Problem)
    buffers: Buffers = field(default_factory=Buffers)
    lse_strides: tuple[int, int] = (0, 0)
    scratch_bytes: int = 0


def read_call(record: Mapping[str, Any]) -> RecordedCall:
    """The call that `record` describes.

    Args:
        record: ``{"fn", "device": {"sm", "gpc_sms", "stream"}, "args": {...}}`` and optionally ``"env"``.

    Raises:
        CallRefused: the launcher would refuse it.
        KeyError: the record lacks a field.
    """
    reader = _READERS.get(record["fn"])
    if reader is None:
        raise CallRefused("unknown_function", f"no launcher function {record['fn']!r}; there are {sorted(_READERS)}")
    args, device = record["args"], record["device"]
    call = RecordedCall(
        function="decode",
        device=Device(
            sm=device["sm"],
            sm_count=args["sm_count"],
            max_smem_bytes=MAX_SMEM_BYTES,
            max_cluster_size=MAX_CLUSTER_SIZE,
            gpc_sms=device["gpc_sms"],
        ),
        stream=int(device["stream"], 16),
        enable_pdl=bool(args["enable_pdl"]),
    )
    p, b = call.problem, call.buffers
    p.batch_size = args["batch_size"]
    p.max_seq_len_q = args["max_q_len"]
    p.sum_seq_lens_q, p.num_heads_q = args["query"]["shape"][:2]
    p.stride_q_token, p.stride_q_head = args["query"]["strides"][:2]
    p.ragged_q = args["cum_seq_lens_q"] is not None
    p.has_sinks = args["attention_sinks"] is not None
    p.allows_tile_size_kv_64 = record.get("env", {}).get("TRTLLM_GEN_ENABLE_TILE_SIZE_KV64") == "1"
    b.q, b.o = _address(args["query"]), _address(args["out"])
    b.seq_lens_kv = _address(args["seq_lens"])
    b.cum_seq_lens_q = _address(args["cum_seq_lens_q"])
    b.sinks = _address(args["attention_sinks"])
    _read_scales(b, args)
    reader(call, args)
    return call


def _read_decode(call: RecordedCall, args: Args) -> None:
    p = call.problem
    head_dims = (_head_dim(args["value_cache"]), _head_dim(args["out"]))
    if head_dims not in MLA_HEAD_DIMS and head_dims[0] != head_dims[1]:
        raise CallRefused("head_dim_vo", f"head_dim of value_cache is {head_dims[0]}, of out {head_dims[1]}")
    _check_paged(p, args)
    is_mla = (p.head_dim_qk, p.head_dim_v) in MLA_HEAD_DIMS
    p.kernel_type = KernelType.Generation
    p.mask = MaskType.Dense if is_mla else MaskType.Causal
    _read_paged(call, args)
    if args["sparse_mla_top_k"] > 0:
        if (p.head_dim_qk, p.head_dim_v) not in SPARSE_MLA_HEAD_DIMS:
            raise CallRefused(
                "sparse_non_mla", f"sparse attention is for MLA; head_dim is {p.head_dim_qk} and {p.head_dim_v}"
            )
        p.sparse_mla = SparseMlaType.StaticTokenSparse
        p.sparse_top_k = args["sparse_mla_top_k"]
    _carve_workspace(call, args, counters=True)


def _read_context(call: RecordedCall, args: Args) -> None:
    p = call.problem
    call.function = "context"
    head_dims = (_head_dim(args["value_cache"]), _head_dim(args["out"]))
    if head_dims[0] != head_dims[1]:
        raise CallRefused("head_dim_vo", f"head_dim of value_cache is {head_dims[0]}, of out {head_dims[1]}")
    _check_paged(p, args)
    if not args["is_causal"] and args["window_left"] != -1:
        raise CallRefused("noncausal_sliding", "a sliding window needs is_causal")
    p.kernel_type = KernelType.Context
    p.mask = MaskType.Causal if args["is_causal"] else MaskType.Dense
    _read_paged(call, args)
    call.buffers.cum_seq_lens_kv = _address(args["cum_seq_lens_kv"])
    _carve_workspace(call, args, counters=False)


def _check_paged(p: Problem, args: Args) -> None:
    key, value = args["key_cache"], args["value_cache"]
    if key["shape"][:-1] != value["shape"][:-1]:
        raise CallRefused("kv_shape", f"key_cache is {key['shape']}, value_cache {value['shape']}")
    p.head_dim_qk, p.head_dim_v = _head_dim(args["query"]), _head_dim(args["out"])
    if _head_dim(key) != p.head_dim_qk:
        raise CallRefused("head_dim_qk", f"head_dim of key_cache is {_head_dim(key)}, of query {p.head_dim_qk}")
    if _data_type(key) == DataType.E2M1:
        for name in ("key_block_scales", "value_block_scales"):
            if args[name] is None:
                raise CallRefused("missing_block_scales", f"FP4 keys and values need {name}")


def _read_paged(call: RecordedCall, args: Args) -> None:
    p, b = call.problem, call.buffers
    key, value, tables = args["key_cache"], args["value_cache"], args["block_tables"]
    _read_heads(p, key["shape"][-3])
    _read_data_types(call, args, key, value)
    if args["o_sf_vec_size"] not in (16, -1):
        raise CallRefused("o_sf_vec_size", f"o_sf_vec_size is {args['o_sf_vec_size']}; 16, or -1 when unused")
    p.layout = QkvLayout.PagedKv
    p.page_size = key["shape"][-2]
    p.num_pages_k, p.num_pages_v = key["shape"][0], value["shape"][0]
    p.max_pages_per_seq = tables["shape"][-1]
    p.max_seq_len_kv = args["max_kv_len"]
    p.window_left = args["window_left"]
    p.uses_shared_paged_kv_idx = args["uses_shared_paged_kv_idx"] is not False
    p.stride_k_page, p.stride_k_head, p.stride_k_token = _page_strides(key)
    p.stride_v_page, p.stride_v_head, p.stride_v_token = _page_strides(value)
    _read_skip_softmax(call, args)
    b.k, b.v, b.block_tables = _address(key), _address(value), _address(tables)
    b.o_sf = _address(args["out_scale_factor"])
    b.scale_sf_o = args["o_sf_scale"]
    b.start_token_sf_o = args["o_sf_start_index"]
    if p.dtype_k == DataType.E2M1:
        scales = args["key_block_scales"]
        p.stride_kv_sf_page, p.stride_kv_sf_head = scales["strides"][0], scales["strides"][-3]
        b.k_sf, b.v_sf = _address(scales), _address(args["value_block_scales"])


def _read_dsv4(call: RecordedCall, args: Args) -> None:
    p, b = call.problem, call.buffers
    pool, indices = args["primary_kv_cache"], args["sparse_indices"]
    top_k = indices["shape"][-1]
    if top_k % 4:
        raise CallRefused("dsv4_topk_mod4", f"sparse_indices lists {top_k} tokens; a multiple of 4 is needed")
    _read_heads(p, 1)
    _read_data_types(call, args, pool, pool)
    p.layout = QkvLayout.PagedKv
    p.kernel_type = KernelType.Generation
    p.mask = MaskType.Dense
    p.head_dim_qk = p.head_dim_v = 512
    # A page is one token: the pool is seen as [pages * page_size, 1, 512].
    p.page_size = 1
    p.num_pages_k = p.num_pages_v = pool["shape"][0] * pool["shape"][-2]
    p.stride_k_token = p.stride_k_page = p.stride_v_token = p.stride_v_page = pool["strides"][-2]
    p.stride_k_head = p.stride_v_head = pool["strides"][-3]
    p.max_pages_per_seq = p.max_seq_len_kv = p.sparse_top_k = top_k
    p.sparse_mla = SparseMlaType.DynamicTokenSparse
    p.has_sliding_window_pool = True
    p.window_left = 127
    b.k = b.v = _address(pool)
    b.sliding_window_pool = _address(args["sliding_window_kv_cache"])
    b.block_tables = _address(indices)
    b.sparse_top_k_lens = _address(args["sparse_mla_top_k_lens"])
    _carve_workspace(call, args, counters=True)


def _read_ragged(call: RecordedCall, args: Args) -> None:
    p, b = call.problem, call.buffers
    call.function = "ragged"
    query, key, value = args["query"], args["key"], args["value"]
    _read_heads(p, key["shape"][1])
    p.sage_block_q, p.sage_block_k, p.sage_block_p, p.sage_block_v = (
        args[f"num_elts_per_sage_attn_blk_{tensor}"] for tensor in "qkpv"
    )
    _read_data_types(call, args, key, value)
    p.layout = QkvLayout.SeparateQkv
    p.kernel_type = KernelType.Context
    p.mask = MaskType.Causal if args["is_causal"] else MaskType.Dense
    p.head_dim_qk, p.head_dim_v = query["shape"][2], value["shape"][2]
    p.sum_seq_lens_kv = key["shape"][0]
    p.max_seq_len_kv = args["max_kv_len"]
    p.window_left = args["window_left"]
    p.uses_shared_paged_kv_idx = False
    p.stride_k_token, p.stride_k_head = key["strides"][:2]
    p.stride_v_token, p.stride_v_head = value["strides"][:2]
    # Steps over a dimension of size 1, so the value has no effect; wrapped like the launcher's int it stays equal.
    p.stride_k_page, p.stride_v_page = (ctypes.c_int32(math.prod(t["shape"])).value for t in (key, value))
    _read_skip_softmax(call, args)
    b.k, b.v = _address(key), _address(value)
    b.cum_seq_lens_kv = _address(args["cum_seq_lens_kv"])
    b.scale_sf_kv = 0.0
    b.scale_sf_o = args["o_sf_scale"]
    b.sage_sf_q, b.sage_sf_k, b.sage_sf_p, b.sage_sf_v = (_address(args[f"sage_attn_sfs_{t}"]) for t in "qkpv")
    _carve_workspace(call, args, counters=True)


_READERS: dict[str, Callable[[RecordedCall, Args], None]] = {
    "trtllm_paged_attention_decode": _read_decode,
    "trtllm_paged_attention_context": _read_context,
    "trtllm_ragged_attention": _read_ragged,
    "trtllm_paged_attention_decode_sparse_mla_dsv4": _read_dsv4,
}


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else int(tensor["ptr"], 16)


def _data_type(tensor: Tensor) -> DataType:
    return DATA_TYPES.get(tensor["dtype"], DataType.UNKNOWN)


def _values_per_element(tensor: Tensor) -> int:
    return 2 if _data_type(tensor) == DataType.E2M1 else 1


def _head_dim(tensor: Tensor) -> int:
    size: int = tensor["shape"][-1]
    return size * _values_per_element(tensor)


def _page_strides(tensor: Tensor) -> tuple[int, int, int]:
    """(page, head, token) in values."""
    scale = _values_per_element(tensor)
    strides = tensor["strides"]
    return strides[0] * scale, strides[-3] * scale, strides[-2] * scale


def _read_scales(b: Buffers, args: Args) -> None:
    """A scale on the device leaves its address, and on the host what 1.0 would give."""
    bmm1, bmm2 = args["bmm1_scale"], args["bmm2_scale"]
    if isinstance(bmm1, Mapping):
        b.scale_softmax_log2_ptr, bmm1 = _address(bmm1), 1.0
    if isinstance(bmm2, Mapping):
        b.output_scale_ptr, bmm2 = _address(bmm2), 1.0
    b.scale_softmax_log2 = bmm1 * math.log2(math.e)
    b.output_scale = bmm2


def _read_skip_softmax(call: RecordedCall, args: Args) -> None:
    call.buffers.skip_softmax_factor = args["skip_softmax_threshold_scale_factor"] or 0.0
    call.problem.skips_softmax = call.buffers.skip_softmax_factor != 0


def _read_heads(p: Problem, num_heads_kv: int) -> None:
    if num_heads_kv <= 0 or p.num_heads_q % num_heads_kv:
        raise CallRefused(
            "heads_indivisible", f"{p.num_heads_q} query heads are no multiple of {num_heads_kv} key heads"
        )
    p.num_heads_kv = num_heads_kv


def _read_data_types(call: RecordedCall, args: Args, key: Tensor, value: Tensor) -> None:
    """Data types, if a runner exists for them on this architecture."""
    if call.device.sm not in RUNNER_SM:
        raise CallRefused("unsupported_arch", f"these kernels are for sm_100 and sm_103, not sm_{call.device.sm}")
    tensors = {"q": args["query"], "k": key, "v": value, "o": args["out"]}
    for name, allowed in RUNNER_DATA_TYPES.items():
        found = _data_type(tensors[name])
        if found not in allowed:
            names = ", ".join(data_type.name for data_type in allowed)
            raise CallRefused("unsupported_dtype", f"{name} is {tensors[name]['dtype']}; possible are {names}")
        setattr(call.problem, f"dtype_{name}", found)


def _carve_workspace(call: RecordedCall, args: Args, *, counters: bool) -> None:
    """Counters, softmax statistics and scratch, in this order; scratch is what remains."""
    p, b = call.problem, call.buffers
    at = _address(args["workspace_buffer"])
    end = at + args["workspace_size"]

    def take(size: int, category: str, what: str) -> int:
        nonlocal at
        start = -(-at // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        if start + size > end:
            raise CallRefused(category, f"the workspace has {max(end - start, 0)} bytes left, {what} need {size}")
        at = start + size
        return start

    if counters:
        b.counters = take(COUNTER_BYTES, "workspace_counter", "counters")
    lse = args.get("lse")
    if lse is not None:
        p.has_lse = True
        padded = -(-p.max_seq_len_q // 256) * 256
        size = SOFTMAX_STATS_BYTES * p.num_heads_q * p.batch_size * padded + SOFTMAX_GUARD_BYTES
        b.softmax_stats = take(size, "workspace_softmax", "softmax statistics")
        b.lse = _address(lse)
        strides = lse["strides"]
        call.lse_strides = args.get("lse_stride_tokens", strides[0]), args.get("lse_stride_heads", strides[1])
    if counters:
        b.scratch = take(0, "workspace_counter", "scratch")
        call.scratch_bytes = end - at
