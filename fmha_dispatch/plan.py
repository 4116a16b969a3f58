"""From a `_core.Problem` to a launchable plan: choice of family and row, workspace size, loaded kernel."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fmha_dispatch import _core
from fmha_dispatch.errors import Unsupported
from fmha_dispatch.manifest import load_manifest
from fmha_dispatch.tensors import ITEM_BYTES, TensorView

if TYPE_CHECKING:
    from fmha_dispatch.loader import LoadedKernel

# GPUs (major * 10 + minor) that each family has kernels for.
GPUS_OF_FAMILY = {"hopper": (90,), "trtllm-gen": (100, 103)}
# Families that backend "auto" takes. NVIDIA's is there by name only, until it has run on a GPU of its own.
AUTO_FAMILIES = ("hopper",)

_log = logging.getLogger("fmha_dispatch")


@dataclass(frozen=True)
class Choice:
    """What the selector answered, with the table it chose from."""

    family: str
    manifest: _core.Manifest
    decision: _core.Decision

    @property
    def row(self) -> _core.Row:
        """The chosen row; only of a choice that is not a refusal."""
        return self.manifest[self.decision.row]

    @property
    def workspace_bytes(self) -> int:
        """Workspace that the launch needs, wherever in memory it starts."""
        need = self.decision.shape.scratch_bytes
        return need + _core.SCRATCH_ALIGNMENT if need else 0


def check_backend(backend: str) -> None:
    """Raises Unsupported for a backend that this library does not have."""
    if type(backend) is not str or (backend != "auto" and backend not in GPUS_OF_FAMILY):
        raise Unsupported("no such backend", asked=repr(backend), fix=", ".join(("auto", *GPUS_OF_FAMILY)))


def family_of(device: _core.Device, backend: str = "auto") -> str:
    """Name of the kernel family that serves `device`, or that `backend` names.

    Raises:
        Unsupported: none does; no such backend.
    """
    check_backend(backend)
    for family in AUTO_FAMILIES if backend == "auto" else (backend,):
        if device.sm in GPUS_OF_FAMILY[family]:
            return family
    serves = (f"{name} on {' and '.join(f'sm_{sm}' for sm in gpus)}" for name, gpus in GPUS_OF_FAMILY.items())
    raise Unsupported(
        f"backend {backend!r} has no kernels for this GPU",
        found=f"sm_{device.sm}",
        fix=f"backends: {', '.join(serves)}",
    )


def choose(problem: _core.Problem, device: _core.Device, *, trace: bool = False, backend: str = "auto") -> Choice:
    """Selects among existing rows.

    Args:
        trace: also give a reason for every row that was not taken (``decision.rejected``) and the steps of the rules.
        backend: ``auto``, or the name of a family.

    Raises:
        Unsupported: no family for the GPU, or no row for the problem.
    """
    family = family_of(device, backend)
    manifest = load_manifest(family)
    choice = Choice(family, manifest, _core.select(problem, manifest, device, trace))
    if choice.decision.row < 0 and not trace:
        raise Unsupported(choice.decision.reason)
    return choice


def supports(problem: _core.Problem, device: _core.Device, backend: str = "auto") -> bool:
    """Whether `choose` finds a row: the same predicate, no second opinion."""
    try:
        choose(problem, device, backend=backend)
    except Unsupported:
        return False
    return True


def workspace_bytes(problem: _core.Problem, device: _core.Device, backend: str = "auto") -> int:
    """Exact workspace size in bytes of the launch that `problem` gets on `device`.

    Raises:
        Unsupported: as `choose`.
    """
    return choose(problem, device, backend=backend).workspace_bytes


def workspace_bound(problem: _core.Problem, device: _core.Device) -> int:
    """Bytes that are enough for every launch with the dtypes and head_dim of `problem` on `device`.

    Independent of batch, lengths, window and head counts: what an engine allocates once.

    Raises:
        Unsupported: no family for the GPU, or no kernel with these dtypes and this head_dim.
    """
    bound = _core.scratch_bound(problem, load_manifest(family_of(device)), device)
    if bound < 0:
        raise Unsupported(choose(problem, device, trace=True).decision.reason)
    return bound + _core.SCRATCH_ALIGNMENT


def prepare(problems: Iterable[_core.Problem], device: int = 0, backend: str = "auto") -> list[LoadedKernel]:
    """Loads every kernel that `problems` need on CUDA device `device`; what is loaded already costs nothing.

    For start-up: before the KV cache takes the memory, and before any stream is captured.

    Returns:
        The kernels, each once, with the seconds and device bytes that loading took.

    Raises:
        Unsupported, ArtifactMissing, IntegrityError, DeviceError, DriverError.
    """
    from fmha_dispatch.device import describe

    gpu = describe(device)
    kernels: dict[str, LoadedKernel] = {}
    for problem in problems:
        for kernel in _kernels(choose(problem, gpu, backend=backend), problem, device, None):
            if kernel is not None:
                kernels[kernel.name] = kernel
    return list(kernels.values())


def _kernels(
    choice: Choice, problem: _core.Problem, device: int, stream: int | None
) -> tuple[LoadedKernel, LoadedKernel | None, LoadedKernel | None]:
    """The attention kernel and those that follow it (reduction, LSE), loaded."""
    from fmha_dispatch import loader, store

    def load(path: str, param_bytes: int) -> LoadedKernel:
        artifact = store.default_store().lock.by_path.get(path)
        known = None if artifact is None else loader.loaded(device, artifact.sha256, artifact.symbol)
        return known or loader.load(store.find(path), device, stream=stream, param_bytes=param_bytes)

    reduction, lse = _core.followers(problem, choice.manifest, choice.decision)
    return (
        load(choice.row.cubin, _core.KERNEL_PARAMS_BYTES),
        None if reduction is None else load(reduction, _core.REDUCTION_PARAM_BYTES),
        None if lse is None else load(lse, _core.LSE_PARAM_BYTES),
    )


class DecodePlan:
    """A decode call ready to be launched again and again; immutable after `create`.

    Attributes:
        problem: the question.
        choice: the answer, None when there is nothing to compute.
        device: CUDA ordinal.
        launcher: the C++ half with prefilled KernelParams; None when there is nothing to compute.
        value_offset: bytes from K to V when both come in one tensor.
        workspace_bytes: size of the workspace that the call brought.
        out_dtype: torch name.
    """

    __slots__ = ("choice", "device", "launcher", "out_dtype", "problem", "value_offset", "workspace_bytes")

    def __init__(
        self,
        problem: _core.Problem,
        choice: Choice | None,
        device: int,
        launcher: _core.Launcher | None,
        value_offset: int,
        workspace_bytes: int,
        out_dtype: str,
    ) -> None:
        self.problem = problem
        self.choice = choice
        self.device = device
        self.launcher = launcher
        self.value_offset = value_offset
        self.workspace_bytes = workspace_bytes
        self.out_dtype = out_dtype

    @classmethod
    def create(
        cls,
        problem: _core.Problem,
        device: int,
        *,
        backend: str,
        stream: int,
        workspace: TensorView,
        value_offset: int,
        out_dtype: str,
    ) -> DecodePlan:
        """Selects, finds, verifies and loads the kernel of `problem` on CUDA device `device`.

        Args:
            backend: as `choose`.
            stream: handle of the stream that will launch it; under its capture nothing can be loaded.
            workspace: the scratch tensor of the call.

        Raises:
            Unsupported, ArtifactMissing, IntegrityError, NotPrepared, DriverError.
        """
        workspace_have = workspace.numel * ITEM_BYTES.get(workspace.dtype, 1)
        if problem.sum_seq_lens_q == 0 or problem.batch_size == 0:
            return cls(problem, None, device, None, value_offset, workspace_have, out_dtype)
        from fmha_dispatch.device import describe, driver

        gpu = describe(device)
        choice = choose(problem, gpu, backend=backend)
        attention, reduction, lse = _kernels(choice, problem, device, stream)
        name = choice.row.name
        launcher = _core.Launcher(
            driver(),
            problem,
            choice.manifest,
            choice.decision,
            attention.function,
            device,
            attention.context,
            name,
            gpu=gpu,
            reduction=0 if reduction is None else reduction.function,
            lse=0 if lse is None else lse.function,
        )
        _log.info("cuda:%d: %s: %s", device, name, choice.decision.reason)
        return cls(problem, choice, device, launcher, value_offset, workspace_have, out_dtype)
