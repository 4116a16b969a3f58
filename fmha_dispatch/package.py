"""Cubins inside an installed Python package of another project: a layer that is only read, and never imported."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from pathlib import Path

from fmha_dispatch.lockfile import Artifact, LockFile
from fmha_dispatch.sources import file_size, read_file

# NVIDIA names an artifact version by a commit.
_VERSION = re.compile(r"[0-9a-f]{40}")


class InstalledPackage:
    """The artifacts of one family as files below the folder of a package.

    Any release of the package will do: what a file holds decides, never a version. Releases name their folders by
    artifact version, and a cubin that stayed the same lies in another version's folder with the same bytes.
    """

    kind = "package"

    def __init__(self, root: Path, folder: str, family: str) -> None:
        """
        Args:
            folder: below `root`, where the lock's own version of the family lies.
        """
        self.root = root
        self.folder = folder
        self.family = family
        self.name = f"package {root}"

    def size(self, artifact: Artifact) -> int | None:
        sizes = [file_size(path) for path in self._paths(artifact)]
        return artifact.size if artifact.size in sizes else next(iter(sizes), None)

    def read(self, artifact: Artifact) -> bytes | None:
        found = [read_file(path, artifact.size) for path in self._paths(artifact)]
        good = (data for data in found if data is not None and hashlib.sha256(data).hexdigest() == artifact.sha256)
        # Wrong bytes in the folder of the lock's own version are damage, and the store says so. In another version's
        # folder they are another build.
        return next(good, next(iter(found), None))

    def _paths(self, artifact: Artifact) -> list[Path]:
        if artifact.family != self.family:
            return []
        return [folder / artifact.path.partition("/")[2] for folder in self._folders]

    @functools.cached_property
    def _folders(self) -> list[Path]:
        """One for each version in the package, the lock's own first."""
        own = self.root / self.folder
        pattern = "/".join("*" if _VERSION.fullmatch(part) else part for part in self.folder.split("/"))
        return [own, *sorted(path for path in self.root.glob(pattern) if path != own)]


def packages(lock: LockFile) -> list[InstalledPackage]:
    """Layers for the packages that carry cubins of the lock, of those that are installed."""
    layers = []
    for name, family in sorted(lock.families.items()):
        root = find_package(family.package.module) if family.package else None
        if family.package is not None and root is not None:
            layers.append(InstalledPackage(root, family.package.folder, name))
    return layers


def find_package(module: str) -> Path | None:
    """The folder of an importable top-level package, found without running its code; None if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # ValueError: a stand-in in sys.modules
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return next((path for path in map(Path, spec.submodule_search_locations) if path.is_dir()), None)
