"""From an artifact of the lock to verified bytes: layers in order, the network last, every byte hashed before use."""

from __future__ import annotations

import functools
import logging
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fmha_dispatch.cache import Cache, publish
from fmha_dispatch.cubin import VerifiedCubin, verify
from fmha_dispatch.errors import ArtifactMissing, FmhaError, IntegrityError, StoreError
from fmha_dispatch.lockfile import Artifact, LockFile, installed_lock
from fmha_dispatch.package import packages
from fmha_dispatch.settings import Settings
from fmha_dispatch.sources import DATA, Folder, Source, packs, read_file

if TYPE_CHECKING:
    from fmha_dispatch.fetch import Fetcher

_log = logging.getLogger("fmha_dispatch")

# Artifacts that a message names one by one.
_NAMED = 20

# Connections that a fetch of many artifacts keeps open.
_WORKERS = 4


@dataclass
class Local:
    """What the layers of this machine hold of one artifact.

    Attributes:
        cubin: verified bytes, if any layer has them.
        source: name of that layer.
        faults: layers that hold something else, with what is wrong there.
    """

    cubin: VerifiedCubin | None = None
    source: str | None = None
    faults: list[tuple[Source, FmhaError]] = field(default_factory=list)


class Store:
    """The artifacts of one lock.

    Layers, first hit wins: `folder` (explicit), the settings' ``cubin_dir``, embedded packs, installed packages, the
    user cache, ``file://`` mirrors; then HTTP(S). A layer that holds wrong bytes is warned of and passed over.
    """

    def __init__(
        self, lock: LockFile, settings: Settings, *, folder: Path | None = None, data: Path = DATA, network: bool = True
    ) -> None:
        """
        Args:
            folder: layer before all others, laid out by artifact path.
            data: folder of the embedded packs.
            network: False: as the setting ``offline``.
        """
        self.lock = lock
        self.settings = settings
        self.cache = Cache(settings.cache_dir, settings.limits) if settings.cache_dir else None
        self.offline = settings.offline or not network
        self.sources: list[Source] = []
        if folder is not None:
            self.sources.append(Folder(folder))
        if settings.cubin_dir is not None:
            self.sources.append(Folder(settings.cubin_dir))
        self.sources += packs(lock, data)
        self.sources += packages(lock)
        if self.cache is not None:
            self.sources.append(self.cache)
        for url in settings.mirrors:
            if _is_file(url):
                self.sources.append(Folder(_path_of(url), "mirror"))
        self._told: set[str] = set()

    def urls(self, artifact: Artifact) -> list[str]:
        """Where `artifact` may be fetched: mirrors by its path, then repositories by its path within the family."""
        within = artifact.path.partition("/")[2]
        bases = [(url, artifact.path) for url in self.settings.mirrors if not _is_file(url)]
        bases += [(url, within) for url in self.lock.families[artifact.family].repositories]
        return [join_url(base, path) for base, path in bases]

    def local(self, artifact: Artifact, sources: Sequence[Source] | None = None) -> Local:
        """What this machine's layers hold; opens no connection."""
        found = Local()
        for source in self.sources if sources is None else sources:
            try:
                data = source.read(artifact)
                if data is not None:
                    found.cubin = verify(data, artifact)
                    found.source = source.name
                    break
            except (IntegrityError, StoreError) as error:
                named = type(error)(f"{source.name}: {error.message}", asked=error.asked, found=error.found)
                found.faults.append((source, named))
        return found

    def get(self, artifact: Artifact) -> VerifiedCubin:
        """Verified bytes of `artifact`, fetched if need be.

        Raises:
            ArtifactMissing: in no layer, and it may not or cannot be fetched.
            IntegrityError: what there is, is damaged, and no good copy can be had.
            FetchError: the network did not deliver.
        """
        found = self._local_with_warnings(artifact)
        if found.cubin is not None:
            return found.cubin
        if self.offline or not self.urls(artifact):
            raise self.missing([artifact], found.faults)
        from fmha_dispatch.fetch import Fetcher

        with Fetcher(self.settings) as fetcher:
            return self._fetch(artifact, fetcher)

    def require(self, artifacts: Iterable[Artifact]) -> None:
        """Checks that this machine's layers hold all `artifacts`; nothing is fetched.

        Raises:
            ArtifactMissing: with all that are missing.
            IntegrityError: some are damaged, and no layer has a good copy.
        """
        missing: list[Artifact] = []
        faults: list[tuple[Source, FmhaError]] = []
        for artifact in artifacts:
            found = self._local_with_warnings(artifact)
            if found.cubin is None:
                missing.append(artifact)
                faults += found.faults
        if missing:
            raise self.missing(missing, faults)

    def fetch_all(
        self, artifacts: Iterable[Artifact], progress: Callable[[Artifact], None] = lambda artifact: None
    ) -> dict[str, FmhaError]:
        """Makes every artifact available on this machine; path -> error of those that are not.

        Args:
            progress: called for each artifact when it is done, from any thread.

        Raises:
            StoreError: the cache cannot be written; fetching on would not help.
        """
        errors: dict[str, FmhaError] = {}
        wanted: list[Artifact] = []
        for artifact in artifacts:
            found = self._local_with_warnings(artifact)
            if found.cubin is not None:
                progress(artifact)
            elif self.offline or not self.urls(artifact):
                errors[artifact.path] = self.missing([artifact], found.faults)
            else:
                wanted.append(artifact)
        if not wanted:
            return errors
        if self.cache is None:
            raise StoreError("there is no cache folder", fix="set FMHA_DISPATCH_CACHE_DIR or pass --cache-dir")
        self.cache.sweep()
        from fmha_dispatch.fetch import Fetcher

        with Fetcher(self.settings, connections=_WORKERS) as fetcher, ThreadPoolExecutor(_WORKERS) as pool:

            def one(artifact: Artifact) -> None:
                try:
                    self._fetch(artifact, fetcher, must_cache=True)
                except StoreError:
                    raise
                except FmhaError as error:
                    errors[artifact.path] = error
                else:
                    progress(artifact)

            futures = [pool.submit(one, artifact) for artifact in wanted]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                fetcher.cancel()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return dict(sorted(errors.items()))

    def copy_to(self, folder: Path, artifacts: Iterable[Artifact]) -> None:
        """Writes verified artifacts below `folder` by path, for use as ``FMHA_DISPATCH_CUBIN_DIR``.

        Raises:
            StoreError: the disk refused.
            FmhaError: as `get`.
        """
        for artifact in artifacts:
            path = folder / artifact.path
            if read_file(path, artifact.size) != (data := self.get(artifact).data):
                publish(path, data, path.parent)

    def missing(self, artifacts: Sequence[Artifact], faults: Sequence[tuple[Source, FmhaError]] = ()) -> FmhaError:
        """The error for artifacts that this machine lacks, and the command that gets them.

        Its text names a few; ``missing`` (and ``--json``) names all.
        """
        names = [artifact.path for artifact in artifacts]
        damaged = [fault for _, fault in faults if isinstance(fault, IntegrityError)]
        if damaged and len(artifacts) == 1:
            first, *others = damaged
            also = "".join(f"; {fault.message}" for fault in others)
            return IntegrityError(first.message + also, asked=first.asked, found=first.found, fix=self._fix(artifacts))
        if damaged:
            return IntegrityError(
                f"{len(names)} cubin(s) are damaged or not on this machine",
                asked=_some(names),
                found=_some([fault.message for fault in damaged]),
                fix=self._fix(artifacts),
            )
        found = "; ".join(fault.message for _, fault in faults)
        looked = ", ".join(source.name for source in self.sources) or "no layer"
        return ArtifactMissing(
            f"{len(names)} cubin(s) are not on this machine" + (" and it is offline" if self.offline else ""),
            asked=_some(names),
            found=found or f"looked in {looked}",
            fix=self._fix(artifacts),
            missing=names,
        )

    def _fix(self, artifacts: Sequence[Artifact]) -> str:
        if not all(self.urls(artifact) for artifact in artifacts):
            return "reinstall fmha-dispatch (these cubins come with it), or set FMHA_DISPATCH_CUBIN_DIR to a copy"
        families = " ".join(f"--family {name}" for name in sorted({artifact.family for artifact in artifacts}))
        only = f" --path {artifacts[0].path}" if len(artifacts) == 1 else ""
        online = "FMHA_DISPATCH_OFFLINE=0 " if self.offline else ""
        return f"{online}fmha-dispatch fetch {families}{only}"

    def _local_with_warnings(self, artifact: Artifact) -> Local:
        found = self.local(artifact)
        for source, fault in found.faults:
            self._tell(str(fault))
            if isinstance(source, Cache) and isinstance(fault, IntegrityError):
                source.quarantine(artifact)
        return found

    def _tell(self, warning: str) -> None:
        if warning not in self._told:
            self._told.add(warning)
            _log.warning("%s", warning)

    def _fetch(self, artifact: Artifact, fetcher: Fetcher, *, must_cache: bool = False) -> VerifiedCubin:
        if self.cache is None:
            self._tell("not cached: no cache folder is known (set FMHA_DISPATCH_CACHE_DIR)")
            return fetcher.fetch(artifact, self.urls(artifact))
        with self.cache.lock(artifact):
            # Whoever held the lock before may have fetched it.
            found = self.local(artifact, [self.cache])
            if found.cubin is not None:
                return found.cubin
            cubin = fetcher.fetch(artifact, self.urls(artifact))
            try:
                self.cache.put(artifact, cubin.data)
            except StoreError as error:
                if must_cache:
                    raise
                self._tell(f"not cached: {error}")
            return cubin


def _some(names: Sequence[str]) -> str:
    """The names, or the first of them and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def join_url(base: str, path: str) -> str:
    """`path` below `base`: one slash between them, a query of the base (a signed URL) kept at the end."""
    parts = urllib.parse.urlsplit(base)
    joined = parts.path.rstrip("/") + "/" + urllib.parse.quote(path.lstrip("/"))
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, joined, parts.query, ""))


def _is_file(url: str) -> bool:
    return urllib.parse.urlsplit(url).scheme == "file"


def _path_of(file_url: str) -> Path:
    return Path(urllib.request.url2pathname(urllib.parse.urlsplit(file_url).path))


@functools.cache
def default_store() -> Store:
    """The store of this installation, with the settings that the environment had at the first call."""
    return Store(installed_lock(), Settings.from_environment())


def find(path: str) -> VerifiedCubin:
    """The cubin at `path` of the lock, as a manifest row names it.

    Raises:
        IntegrityError: the lock has no such artifact.
        FmhaError: as `Store.get`.
    """
    store = default_store()
    artifact = store.lock.by_path.get(path)
    if artifact is None:
        raise IntegrityError(
            f"cubins.lock has no artifact {path}", fix="reinstall fmha-dispatch: lock and manifest differ"
        )
    return store.get(artifact)
