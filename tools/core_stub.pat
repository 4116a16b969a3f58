# Signatures that nanobind cannot know; read by tools/make_stub.
fmha_dispatch._core.SparseMlaType.None:

fmha_dispatch._core.(Problem|Buffers).__init__:
    \from typing import Any
    def __init__(self, **kwargs: Any) -> None: ...

fmha_dispatch._core.Manifest.pack:
    \from typing import Any
    @staticmethod
    def pack(rows: list[dict[str, Any]]) -> bytes:
        \doc

fmha_dispatch._core.Shape.grid:
    @property
    def grid(self) -> tuple[int, int, int]: ...

fmha_dispatch._core.Decision.shape:
    @property
    def shape(self) -> Shape: ...

fmha_dispatch._core.Decision.rejected:
    @property
    def rejected(self) -> list[tuple[int, str]]: ...

fmha_dispatch._core.tensor_maps:
    \from typing import Any
    def tensor_maps(problem: Problem, manifest: Manifest, decision: Decision, buffers: Buffers) -> list[dict[str, Any]]:
        \doc

fmha_dispatch._core.separate_reduction:
    \from typing import Any
    def separate_reduction(problem: Problem, manifest: Manifest, decision: Decision, device: Device) -> dict[str, Any] | None:
        \doc

fmha_dispatch._core.followers:
    def followers(problem: Problem, manifest: Manifest, decision: Decision) -> tuple[str | None, str | None]:
        \doc

fmha_dispatch._core.lse_launch:
    def lse_launch(problem: Problem) -> tuple[int, int, int]:
        \doc
