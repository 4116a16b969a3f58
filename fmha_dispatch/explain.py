"""``fmha-dispatch explain``: which kernel a decode call gets, with what launch, and why no other row was taken."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fmha_dispatch import _core
from fmha_dispatch.errors import ExitCode, InvalidArgument
from fmha_dispatch.plan import Choice, choose
from fmha_dispatch.problem import dense_decode_problem

# The GPU that a call is planned for when none is named: NVIDIA H200.
H200: dict[str, Any] = {"sm": 90, "sm_count": 132, "max_smem_bytes": 232448, "max_cluster_size": 8}

# GPUs of NVIDIA's family: how many SMs, in GPCs of how many.
BLACKWELL = {
    "b200": {"sm": 100, "sm_count": 148, "max_cluster_size": 16, "gpc_sms": [20, 20, 20, 18, 18, 18, 18, 16]},
    "b300": {"sm": 103, "sm_count": 160, "max_cluster_size": 16, "gpc_sms": [20] * 8},
}

# The reference models: query heads, KV heads, head_dim.
HEADS = {"num_heads_q": 96, "num_heads_kv": 8, "head_dim": 128}
MODELS = {"qwen3-480b": (96, 8, 128), "gpt-oss": (64, 8, 64)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that state a decode problem and a GPU."""
    parser.add_argument("--model", choices=sorted(MODELS), help="sets the three head options")
    for name, default in HEADS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default {default}, or the model's")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--q-len", type=int, default=1, help="query tokens of each request (drafts + 1)")
    parser.add_argument("--kv-len", type=int, default=8192)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", help="of query, K, V and out: bfloat16 or float16")
    parser.add_argument("--window-left", type=int, default=-1)
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--lse", action="store_true")
    parser.add_argument("--gpu", choices=sorted(BLACKWELL), help="in place of the GPU options: choose for this one")
    for name, value in H200.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"of the GPU; default {value}, an H200's")


def run(args: argparse.Namespace) -> int:
    """Prints the decision; exit code 1 when no kernel takes the call."""
    heads = dict(zip(HEADS, MODELS[args.model], strict=True)) if args.model else HEADS
    heads = {name: default if getattr(args, name) is None else getattr(args, name) for name, default in heads.items()}
    given = {name: getattr(args, name) for name in H200 if getattr(args, name) is not None}
    if args.gpu and given:
        raise InvalidArgument(
            "--gpu and the options of another GPU exclude each other", asked=f"--gpu {args.gpu}, {given}"
        )
    problem = dense_decode_problem(
        dtype=args.dtype,
        batch_size=args.batch_size,
        q_len=args.q_len,
        kv_len=args.kv_len,
        **heads,
        page_size=args.page_size,
        window_left=args.window_left,
        sinks=args.sinks,
        lse=args.lse,
    )
    device = H200 | given | BLACKWELL.get(args.gpu, {})
    backend = "trtllm-gen" if args.gpu else "auto"
    choice = choose(problem, _core.Device(**device), trace=True, backend=backend)
    report = describe_choice(choice, problem)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return ExitCode.OK if report["supported"] else ExitCode.USER


def describe_choice(choice: Choice, problem: _core.Problem) -> dict[str, Any]:
    """The decision as a JSON-ready object: kernel, launch, split, workspace, tensor maps, rejected rows."""
    decision = choice.decision
    report: dict[str, Any] = {"family": choice.family, "supported": decision.row >= 0, "reason": decision.reason}
    if decision.row >= 0:
        shape = decision.shape
        report |= {
            "kernel": choice.row.name,
            "cubin": choice.row.cubin,
            "launch": {
                "grid": list(shape.grid),
                "cluster": shape.cluster,
                "block": shape.block,
                "smem_bytes": shape.smem_bytes,
            },
            "num_ctas_q": shape.num_ctas_q,
            "num_ctas_kv": shape.num_ctas_kv,
            "num_tokens_per_cta_q": shape.num_tokens_per_cta_q,
            "num_counters": shape.num_counters,
            "workspace_bytes": choice.workspace_bytes,
            "workspace_alignment": _core.SCRATCH_ALIGNMENT,
            "tensor_maps": _core.tensor_maps(problem, choice.manifest, decision, _core.Buffers()),
        }
    report["steps"] = decision.steps
    report["rejected"] = [{"kernel": choice.manifest[row].name, "reason": reason} for row, reason in decision.rejected]
    return report


def _print_report(report: dict[str, Any]) -> None:
    print(report["reason"])
    for name in ("kernel", "cubin", "launch", "num_ctas_q", "num_ctas_kv", "num_tokens_per_cta_q", "workspace_bytes"):
        if name in report:
            print(f"  {name}: {report[name]}")
    for step in report["steps"]:
        print(f"  {step}")
    if not report["rejected"]:
        return
    by_reason: dict[str, list[str]] = {}
    for entry in report["rejected"]:
        by_reason.setdefault(entry["reason"], []).append(entry["kernel"])
    print(f"rows not taken ({len(report['rejected'])}; all of them with --json):")
    for reason, kernels in by_reason.items():
        more = f" and {len(kernels) - 1} more" if len(kernels) > 1 else ""
        print(f"  {kernels[0]}{more}: {reason}")
