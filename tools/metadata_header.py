"""NVIDIA's metadata header of the trtllm-gen cubins: one C struct, one array of it, read without a compiler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STRUCT = "TllmGenFmhaKernelMetaInfo"

# Field of the struct -> column of csrc/manifest.h. A field in neither table stops the import: what a new field means
# for selection must be decided by a person.
COLUMNS = {
    "mDataTypeQ": "dtype_q",
    "mDataTypeK": "dtype_k",
    "mDataTypeV": "dtype_v",
    "mDataTypeO": "dtype_o",
    "mTileSizeQ": "tile_size_q",
    "mTileSizeKv": "tile_size_kv",
    "mStepQ": "step_q",
    "mStepKv": "step_kv",
    "mHeadDimPerCtaV": "head_dim_per_cta_v",
    "mHeadDimQk": "head_dim_qk",
    "mHeadDimV": "head_dim_v",
    "mSM": "sm",
    "mFuncName": "symbol",
    "mSharedMemBytes": "smem_bytes",
    "mThreadsPerCTA": "threads",
    "mQkvLayout": "layout",
    "mNumTokensPerPage": "num_tokens_per_page",
    "mMaskType": "mask",
    "mKernelType": "kernel_type",
    "mTileScheduler": "scheduler",
    "mMultiCtasKvMode": "multi_ctas_kv_mode",
    "mNumEltsPerSageAttnBlkQ": "sage_q",
    "mNumEltsPerSageAttnBlkK": "sage_k",
    "mNumEltsPerSageAttnBlkP": "sage_p",
    "mNumEltsPerSageAttnBlkV": "sage_v",
    "mGroupsHeadsQ": "groups_heads_q",
    "mGroupsTokensHeadsQ": "groups_tokens_heads_q",
    "mReuseSmemKForV": "reuse_smem_k_for_v",
    "m2CtaMma": "uses_2cta_mma",
    "mSparseAttn": "sparse_mla",
    "mSkipsSoftmaxWhenPossible": "skips_softmax",
}
SHA256 = "sha256"
# Fields that carry nothing: the only value each may have, None for any.
EMPTY = {"mDataTypeKv": None, "mCubin": "nullptr", "mCubinSize": "0", "mReserved1": "false", "mReserved2": "false"}

# The number that an enum-valued int stands for is the position of its name.
ENUMS = {
    "layout": ("SeparateQkv", "PackedQkv", "PagedKv", "ContiguousKv"),
    "mask": ("Dense", "Causal", "SlidingOrChunkedCausal", "Custom"),
    "kernel_type": (
        "Context",
        "Generation",
        "SwapsMmaAbForGeneration",
        "KeepsMmaAbForGeneration",
        "SpecDecodingGeneration",
    ),
    "scheduler": ("Static", "Persistent"),
    "multi_ctas_kv_mode": ("Disabled", "GmemReduction", "GmemReductionWithSeparateKernel", "CgaSmemReduction"),
    "sparse_mla": ("None", "StaticTokenSparse", "DynamicTokenSparse"),
}
SM = {"kSM_100": 100, "kSM_103": 103, "kSM_100f": 10100}

_FIELD = re.compile(r"\s*[\w ]+[ *]+(\w+)\s*;\s*")
_INITIALIZER = re.compile(r"^\s*\{(.*)\}\s*,?\s*$")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class HeaderError(ValueError):
    """The header is not what this reader knows; the message names line and field."""


@dataclass(frozen=True)
class Kernel:
    """One array element: its manifest columns (without `name` and `cubin`) and the digest of its cubin."""

    columns: dict[str, Any]
    sha256: str


def read_kernels(header: str) -> list[Kernel]:
    """The array elements in the order of the file.

    Raises:
        HeaderError: a struct field or a value that this reader does not know, or an array that ends early.
    """
    lines = header.splitlines()
    fields = list(_struct_fields(lines))
    unknown = [name for name in fields if name not in COLUMNS and name not in EMPTY and name != SHA256]
    missing = [name for name in (*COLUMNS, SHA256) if name not in fields]
    if unknown or missing:
        raise HeaderError(f"struct {STRUCT}: new fields {unknown}, missing fields {missing}")
    kernels = []
    for number, line in _array_lines(lines):
        match = _INITIALIZER.match(line)
        if not match:
            raise HeaderError(f"line {number}: no array element: {line[:80]!r}")
        values = [value.strip() for value in match[1].split(",")]
        if len(values) != len(fields):
            raise HeaderError(f"line {number}: {len(values)} values for {len(fields)} fields")
        kernels.append(_kernel(dict(zip(fields, values, strict=True)), number))
    return kernels


def _struct_fields(lines: list[str]) -> Iterator[str]:
    start = _find(lines, re.compile(rf"\s*struct {STRUCT}\s*\{{?\s*$"))
    for number, line in enumerate(lines[start + 1 :], start + 2):
        if line.strip() in ("", "{"):
            continue
        if line.strip() == "};":
            return
        match = _FIELD.fullmatch(line)
        if not match:
            raise HeaderError(f"line {number}: no struct field: {line[:80]!r}")
        yield match[1]
    raise HeaderError(f"struct {STRUCT} has no end")


def _array_lines(lines: list[str]) -> Iterator[tuple[int, str]]:
    start = _find(lines, re.compile(rf".*\b{STRUCT}\s+\w+\[\]\s*=\s*\{{\s*$"))
    for number, line in enumerate(lines[start + 1 :], start + 2):
        if line.strip() == "};":
            return
        if line.strip():
            yield number, line
    raise HeaderError(f"array of {STRUCT} has no end: the file is cut short")


def _find(lines: list[str], pattern: re.Pattern[str]) -> int:
    for index, line in enumerate(lines):
        if pattern.match(line):
            return index
    raise HeaderError(f"no line like {pattern.pattern!r}")


def _kernel(fields: dict[str, str], number: int) -> Kernel:
    for name, only in EMPTY.items():
        if only is not None and fields.get(name, only) != only:
            raise HeaderError(f"line {number}: {name} is {fields[name]}, expected {only}")
    sha256 = fields[SHA256].strip('"')
    if not _DIGEST.fullmatch(sha256):
        raise HeaderError(f"line {number}: sha256 is {sha256!r}")
    columns = {}
    for name, column in COLUMNS.items():
        try:
            columns[column] = _value(column, fields[name])
        except (KeyError, IndexError, ValueError):
            raise HeaderError(f"line {number}: {name} is {fields[name]}") from None
    # A row for 128 tokens a page serves every page size that is a multiple of it unless its name fixes the size.
    columns["dynamic_page"] = columns["num_tokens_per_page"] == 128 and "P128" not in columns["symbol"]
    return Kernel(columns, sha256)


def _value(column: str, text: str) -> Any:
    if column == "symbol":
        if not re.fullmatch(r'"\w+"', text):
            raise ValueError(text)
        return text[1:-1]
    if column == "sm":
        return SM[text]
    if column.startswith("dtype_"):
        return text.removeprefix("DATA_TYPE_")
    if text in ("true", "false"):
        return text == "true"
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return ENUMS[column][number] if column in ENUMS else number
