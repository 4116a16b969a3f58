"""``fmha-dispatch replay``: recorded calls in, decisions out, one JSON object a line. Needs no GPU and no cubins."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from fmha_dispatch import _core
from fmha_dispatch.console import path_option
from fmha_dispatch.errors import ExitCode, InvalidArgument
from fmha_dispatch.recorded_call import CallRefused, RecordedCall, read_call
from fmha_dispatch.settings import LIMITS, Limits

FAMILY = "trtllm-gen"

_STANDARD = Path("-")

_SLOTS = ("tmaQ_", "tmaK_", "tmaKSlidingWindowKvPool_", "tmaV_", "tmaO_", "tmaKSf_", "tmaVSf_")
_CLUSTER_DIMENSION, _CLUSTER_POLICY, _PROGRAMMATIC_SERIALIZATION = 4, 5, 6  # CUlaunchAttributeID
_POLICY_DEFAULT, _POLICY_SPREAD = 0, 1
_LSE_FUNCTION = "_ZN10flashinfer22ComputeLSEFromMDKernelEP6float2Pfilli"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Input and output files."""
    parser.add_argument(
        "input", type=path_option, metavar="IN", help="calls, one JSON object a line; .gz is unpacked; - reads stdin"
    )
    parser.add_argument("--trace", action="store_true", help="add how the rules came to each decision")
    parser.add_argument(
        "--out",
        type=path_option,
        default=_STANDARD,
        metavar="OUT",
        help="decisions, one JSON object a line; .gz is packed; default stdout",
    )


def run(args: argparse.Namespace) -> int:
    """Replays a file of calls. Exit code 1 if a line is no call at all; the others are still answered.

    Raises:
        InvalidArgument: a file cannot be opened, or a line has no end; the lines before it are answered.
    """
    from fmha_dispatch.manifest import load_manifest

    manifest = load_manifest(FAMILY)
    malformed = 0
    try:
        with _open(args.input, "r") as lines, _open(args.out, "w") as out:
            for record in replay_lines(_bounded(lines), manifest, trace=args.trace):
                malformed += record["status"] == "malformed"
                out.write(json.dumps(record, separators=(",", ":")) + "\n")
    except BrokenPipeError:
        raise
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise InvalidArgument("cannot replay", found=str(error), fix="a readable input and a writable output") from None
    return ExitCode.USER if malformed else ExitCode.OK


def _bounded(stream: TextIO, limits: Limits = LIMITS) -> Iterator[str]:
    """The lines of `stream`, one that is longer than a call may be as its beginning alone.

    Raises:
        InvalidArgument: a line whose end is not found within the limits.
    """
    number = 0
    while line := stream.readline(limits.call_chars + 1):
        number += 1
        yield line
        part = line
        for _ in range(limits.call_lines):
            if len(part) <= limits.call_chars or part.endswith("\n"):
                break
            part = stream.readline(limits.call_chars + 1)
        else:
            raise InvalidArgument(
                "cannot replay",
                found=f"line {number} has no end within {limits.call_chars * limits.call_lines} characters",
                fix="one recorded call a line",
            )


def replay_lines(lines: Iterable[str], manifest: _core.Manifest, *, trace: bool = False) -> Iterator[dict[str, Any]]:
    """`replay` for every line that is not blank; a line may hold the call alone or under ``problem``.

    A line that is no call, or is longer than the limit ``call_chars``, gives a record of status ``malformed``.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        call_id = None
        try:
            if len(line.rstrip("\n")) > LIMITS.call_chars:
                raise ValueError(f"longer than {LIMITS.call_chars} characters")
            recorded = json.loads(line)
            recorded = recorded.get("problem", recorded)
            call_id = recorded.get("id")
            yield replay(recorded, manifest, trace=trace)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            message = f"line {number} is no recorded call: {type(error).__name__}: {error}"
            yield _record(call_id, "malformed", error={"category": "malformed", "message": message})


def replay(problem: dict[str, Any], manifest: _core.Manifest, *, trace: bool = False) -> dict[str, Any]:
    """The decision for one recorded call.

    Args:
        problem: ``id``, ``fn``, ``device``, ``args`` and optional ``env`` in the format of the golden data.
        manifest: the trtllm-gen table.
        trace: add ``trace``, the steps of the selection in words.

    Returns:
        ``id``, ``status`` (``ok`` or ``error``), ``kernel``, ``launch``, ``params_hex``, ``tma``, ``reduction``,
        ``lse_kernel``, ``error`` (``category``, ``message``); null where there is none.

    Raises:
        LookupError, TypeError, ValueError: `problem` lacks a field or has one of another type.
    """
    call_id = problem.get("id")
    steps: list[str] | None = [] if trace else None
    try:
        record = _record(call_id, "ok", **_decide(read_call(problem), manifest, steps))
    except CallRefused as refusal:
        record = _record(call_id, "error", error={"category": refusal.category, "message": str(refusal)})
    return record if steps is None else record | {"trace": steps}


def _record(call_id: object, status: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": call_id,
        "status": status,
        "kernel": None,
        "launch": None,
        "params_hex": None,
        "tma": None,
        "reduction": None,
        "lse_kernel": None,
        "error": None,
    } | fields


def _decide(call: RecordedCall, manifest: _core.Manifest, steps: list[str] | None) -> dict[str, Any]:
    problem, buffers = call.problem, call.buffers
    decision = _core.select(problem, manifest, call.device, steps is not None)
    if steps is not None:
        steps += [*decision.steps, decision.reason]
    if decision.row < 0:
        raise CallRefused(decision.code, decision.reason)
    row, shape = manifest[decision.row], decision.shape
    try:
        maps = _core.tensor_maps(problem, manifest, decision, buffers)
    except ValueError as error:
        raise CallRefused("misaligned", str(error)) from None
    partial_bytes = shape.partial_stats_bytes + shape.partial_o_bytes
    if shape.num_counters and call.scratch_bytes < partial_bytes:
        raise CallRefused(
            "workspace_scratch",
            f"the workspace has {call.scratch_bytes} bytes left, {row.name} needs {partial_bytes} for partial results",
        )
    pdl = {"id": _PROGRAMMATIC_SERIALIZATION, "value": int(call.enable_pdl)}
    tma: dict[str, Any] = dict.fromkeys(_SLOTS)
    for entry in maps:
        entry["addr"] = hex(entry["addr"])
        tma[entry.pop("slot")] = entry
    return {
        "kernel": row.name,
        "launch": {
            "grid": list(shape.grid),
            "block": [shape.block, 1, 1],
            "smem": shape.smem_bytes,
            "stream": hex(call.stream),
            "attrs": [
                {"id": _CLUSTER_DIMENSION, "value": [shape.cluster, 1, 1]},
                {"id": _CLUSTER_POLICY, "value": _POLICY_SPREAD if shape.cluster > 1 else _POLICY_DEFAULT},
                pdl,
            ],
        },
        "params_hex": _core.fill(problem, manifest, decision, buffers).hex(),
        "tma": tma,
        "reduction": _reduction(call, manifest, decision, pdl),
        "lse_kernel": _lse_kernel(call, pdl),
    }


def _reduction(
    call: RecordedCall, manifest: _core.Manifest, decision: _core.Decision, pdl: dict[str, int]
) -> dict[str, Any] | None:
    launch = _core.separate_reduction(call.problem, manifest, decision, call.device)
    if launch is None:
        return None
    return {
        "func": launch["function"],
        "grid": launch["grid"],
        "block": [launch["block"], 1, 1],
        "smem": 0,
        "stream": hex(call.stream),
        "attrs": [pdl],
        "params_same_as_kernel": True,
        "isTokenSparse": int(launch["is_token_sparse"]),
        "groupsTokensHeadsQ": int(launch["groups_tokens_heads_q"]),
        "supportsVarSparseMlaTopKLens": int(launch["supports_var_sparse_top_k_lens"]),
        "numCtasForReduction": launch["num_ctas_for_reduction"],
        "numCtasForAllHeads": launch["num_ctas_for_all_heads"],
        "headDimV": launch["head_dim_v"],
        "numHeadDimCtasV": launch["num_head_dim_ctas_v"],
    }


def _lse_kernel(call: RecordedCall, pdl: dict[str, int]) -> dict[str, Any] | None:
    if not call.problem.has_lse:
        return None
    values, blocks, threads = _core.lse_launch(call.problem)
    return {
        "func": _LSE_FUNCTION,
        "grid": [blocks, 1, 1],
        "block": [threads, 1, 1],
        "smem": 0,
        "stream": hex(call.stream),
        "attrs": [pdl],
        "md": hex(call.buffers.softmax_stats),
        "lse": hex(call.buffers.lse),
        "num_heads_q": call.problem.num_heads_q,
        "lse_stride_tokens": call.lse_strides[0],
        "lse_stride_heads": call.lse_strides[1],
        "n": values,
    }


def _open(path: Path, mode: str) -> Any:
    """A text stream as a context manager; ``-`` is a standard stream, which stays open."""
    if path == _STANDARD:
        return nullcontext(sys.stdin if mode == "r" else sys.stdout)
    if path.suffix == ".gz":
        return gzip.open(path, mode + "t", encoding="utf-8")
    return path.open(mode, encoding="utf-8")
