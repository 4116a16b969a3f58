"""``fmha-dispatch status``: what is installed, what is present, what this machine is. Reads names and sizes only."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from typing import Any

from fmha_dispatch.errors import FmhaError, IntegrityError, StoreError
from fmha_dispatch.lockfile import SCHEMA, Artifact
from fmha_dispatch.settings import redact
from fmha_dispatch.store import Store
from fmha_dispatch.store_commands import add_store_arguments, chosen, emit, open_store

_PACKAGES = ("fmha-dispatch", "cuda-bindings", "requests", "urllib3", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of status."""
    add_store_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Always 0: a machine without cubins, driver or GPU, or with a damaged pack, has a status too."""
    store = open_store(args)
    faults: dict[str, str] = {}  # layer -> why it cannot be looked at
    families = _families(store, args, faults)
    report = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "lock": {"schema": SCHEMA, "families": len(store.lock.families), "artifacts": len(store.lock.artifacts)},
        "layers": [
            {"kind": source.kind, "name": source.name, "fault": faults.get(source.name)} for source in store.sources
        ],
        "mirrors": [redact(url) for url in store.settings.mirrors],
        "offline": store.offline,
        "families": families,
        "driver": _driver(),
    }
    emit(args, report, _lines(report))
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _layer(store: Store, artifact: Artifact, faults: dict[str, str]) -> str | None:
    """The first layer with an artifact of that name and size: `verify` reads the bytes, and so does every load."""
    for source in store.sources:
        if source.name in faults:
            continue
        try:
            if source.size(artifact) == artifact.size:
                return source.name
        except (StoreError, IntegrityError) as error:
            faults[source.name] = error.message
    return None


def _families(store: Store, args: argparse.Namespace, faults: dict[str, str]) -> dict[str, Any]:
    families: dict[str, Any] = {}
    for artifact in chosen(args, store.lock):
        family = store.lock.families[artifact.family]
        entry = families.setdefault(
            artifact.family,
            {
                "artifacts": 0,
                "arch": [],
                "param_bytes": family.param_bytes,
                "layout": family.layout,
                "nvcc": family.toolchain.nvcc if family.toolchain else None,
                "repositories": list(family.repositories),
                "present": {},
                "missing": [],
            },
        )
        entry["artifacts"] += 1
        if artifact.arch not in entry["arch"]:
            entry["arch"].append(artifact.arch)
        layer = _layer(store, artifact, faults)
        if layer is None:
            entry["missing"].append(artifact.path)
        else:
            entry["present"][layer] = entry["present"].get(layer, 0) + 1
    return families


def _driver() -> dict[str, Any]:
    """Driver version and GPUs, without creating a context; or why there are none."""
    try:
        from fmha_dispatch.device import bindings, call

        attribute = bindings().CUdevice_attribute
        call("cuInit", 0, doing="initialising the driver")
        version = call("cuDriverGetVersion", doing="reading the driver's version")
        gpus = []
        for ordinal in range(call("cuDeviceGetCount", doing="counting GPUs")):
            doing = f"describing cuda:{ordinal}"
            device = call("cuDeviceGet", ordinal, doing=doing)
            major, minor = (
                call("cuDeviceGetAttribute", which, device, doing=doing)
                for which in (
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                )
            )
            name = call("cuDeviceGetName", 128, device, doing=doing).split(b"\0", 1)[0].decode()
            gpus.append({"ordinal": ordinal, "name": name, "sm": 10 * major + minor})
        return {"cuda": f"{version // 1000}.{version % 1000 // 10}", "gpus": gpus}
    except (FmhaError, ImportError) as error:
        return {"absent": error.message if isinstance(error, FmhaError) else str(error)}


def _lines(report: dict[str, Any]) -> list[str]:
    lines = ["versions: " + ", ".join(f"{name} {version or 'absent'}" for name, version in report["versions"].items())]
    lines.append("lock: schema {schema}, {families} families, {artifacts} artifacts".format(**report["lock"]))
    lines += [f"layer: {layer['fault'] or layer['name']}" for layer in report["layers"]]
    lines += [f"mirror: {url}" for url in report["mirrors"]]
    if report["offline"]:
        lines.append("offline: no connection is opened")
    for name, family in report["families"].items():
        present = sum(family["present"].values())
        where = "; ".join(f"{count} in {layer}" for layer, count in family["present"].items())
        lines.append(
            f"family {name}: {present} of {family['artifacts']} cubins present" + (f" ({where})" if where else "")
        )
        lines.append(
            f"  {', '.join(family['arch'])}, {family['param_bytes']} parameter bytes, layout {family['layout']}"
        )
        if family["missing"]:
            lines.append(f"  {len(family['missing'])} missing: fmha-dispatch fetch --family {name}")
    driver = report["driver"]
    if "absent" in driver:
        lines.append(f"driver: none ({driver['absent']})")
    else:
        lines.append(f"driver: CUDA {driver['cuda']}")
        lines += [f"GPU {gpu['ordinal']}: {gpu['name']}, sm_{gpu['sm']}" for gpu in driver["gpus"]]
    return lines
