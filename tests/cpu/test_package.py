"""The layer of an installed package of another project: found without importing it, only read, judged by digests."""

from __future__ import annotations

import builtins
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic import make_cubins, make_lock, make_store

from fmha_dispatch.cli import main
from fmha_dispatch.errors import ArtifactMissing, ExitCode, IntegrityError, LockFileError
from fmha_dispatch.lockfile import LockFile, Package, installed_lock
from fmha_dispatch.package import InstalledPackage, find_package, packages

OURS, OTHERS = "a" * 40, "b" * 40
CUBINS = make_cubins(10, family="remote")
PATHS = sorted(CUBINS)


def lock_of(cubins: dict[str, bytes] = CUBINS) -> LockFile:
    return make_lock(cubins, package=Package("someones_cubins", f"cubins/{OURS}/fmha/gen"))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path with a package whose code must never run."""
    package = tmp_path / "site" / "someones_cubins"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(package.parent))
    yield package
    for folder, _, _ in os.walk(package):
        os.chmod(folder, 0o755)
    assert "someones_cubins" not in sys.modules


def fill(package: Path, version: str, cubins: dict[str, bytes]) -> Path:
    folder = package / "cubins" / version / "fmha" / "gen"
    folder.mkdir(parents=True)
    for path, data in cubins.items():
        (folder / path.partition("/")[2]).write_bytes(data)
    return folder


def test_found_without_import_and_nothing_is_written(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T1.13: package read-only, HOME read-only, cache elsewhere: works, and no write call under the package."""
    fill(site, OURS, CUBINS)
    for folder, _, _ in os.walk(site):
        os.chmod(folder, 0o555)
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    monkeypatch.setenv("HOME", str(home))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in site.rglob("*"))
    touched: list[str] = []

    def refuse(name: str, real: Any) -> Any:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            writes = name != "open" or (rest and rest[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writes and str(path).startswith(str(site)):
                touched.append(f"{name} {path}")
            return real(path, *rest, **named)

        return call

    for name in ("open", "mkdir", "rename", "unlink", "symlink", "chmod", "utime"):
        monkeypatch.setattr(os, name, refuse(name, getattr(os, name)))
    real_open = builtins.open

    def checked_open(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if set(mode) & set("wax+") and str(path).startswith(str(site)):
            touched.append(f"open {path} {mode}")
        return real_open(path, mode, *rest, **named)

    monkeypatch.setattr(builtins, "open", checked_open)
    store = make_store(lock_of(), tmp_path)
    for path in PATHS:
        assert store.get(store.lock.by_path[path]).data == CUBINS[path]
    monkeypatch.undo()
    assert touched == []
    assert sorted((str(path), path.stat().st_mtime_ns) for path in site.rglob("*")) == before
    assert not (tmp_path / "cache").exists()


def test_layer_comes_after_folder_and_before_cache(site: Path, tmp_path: Path) -> None:
    """T1.13: explicit argument, environment, installed package, user cache."""
    lock = lock_of()
    artifact = lock.by_path[PATHS[0]]
    fill(site, OURS, CUBINS)
    store = make_store(lock, tmp_path, folder=tmp_path / "folder", cubin_dir=tmp_path / "environment")
    assert [source.kind for source in store.sources] == ["folder", "folder", "package", "cache"]
    assert store.cache is not None
    store.cache.put(artifact, CUBINS[artifact.path])
    assert store.local(artifact).source == f"package {site}"
    (tmp_path / "folder" / artifact.path).parent.mkdir(parents=True)
    (tmp_path / "folder" / artifact.path).write_bytes(CUBINS[artifact.path])
    assert store.local(artifact).source == f"folder {tmp_path / 'folder'}"


def test_another_release_serves_what_did_not_change(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """T1.15: a package of another version covers 90 %: those load from it, the rest is listed as missing."""
    changed = {path: data + b"\0" for path, data in list(CUBINS.items())[9:]}
    fill(site, OTHERS, {**CUBINS, **changed})
    store = make_store(lock_of(), tmp_path)
    for path in PATHS[:9]:
        assert store.get(store.lock.by_path[path]).data == CUBINS[path]
    with pytest.raises(ArtifactMissing, match=PATHS[9]):
        store.get(store.lock.by_path[PATHS[9]])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_damaged_file_is_named_and_another_copy_is_used(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = fill(site, OURS, CUBINS)
    name = PATHS[0].partition("/")[2]
    (own / name).write_bytes(CUBINS[PATHS[0]][:-1] + b"\1")
    store = make_store(lock_of(), tmp_path)
    with pytest.raises(IntegrityError, match=str(site)):
        store.get(store.lock.by_path[PATHS[0]])
    (fill(site, OTHERS, {}) / name).write_bytes(CUBINS[PATHS[0]])
    assert make_store(lock_of(), tmp_path).get(store.lock.by_path[PATHS[0]]).data == CUBINS[PATHS[0]]


def test_sizes_are_those_of_the_copy_that_fits(site: Path) -> None:
    lock = lock_of()
    own = fill(site, OURS, CUBINS)
    (layer,) = packages(lock)
    artifact, other = lock.by_path[PATHS[0]], lock.by_path[PATHS[1]]
    assert layer.size(artifact) == artifact.size
    (own / PATHS[0].partition("/")[2]).write_bytes(b"short")
    (own / PATHS[1].partition("/")[2]).unlink()
    assert (layer.size(artifact), layer.size(other)) == (5, None)
    fill(site, OTHERS, CUBINS)
    (layer,) = packages(lock)
    assert (layer.size(artifact), layer.size(other)) == (artifact.size, other.size)


def test_other_families_and_absent_packages_are_passed_over(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(site, OURS, CUBINS)
    artifact = lock_of().by_path[PATHS[0]]
    layer = InstalledPackage(site, f"cubins/{OURS}/fmha/gen", "other")
    assert layer.read(artifact) is None and layer.size(artifact) is None
    assert packages(make_lock(CUBINS, package=Package("no_such_package_at_all", "cubins"))) == []
    stand_in = types.ModuleType("stand_in")
    stand_in.__spec__ = None
    monkeypatch.setitem(sys.modules, "stand_in", stand_in)
    assert find_package("stand_in") is None
    assert find_package("abc") is None  # a module, no package


def test_folder_without_code_is_a_package_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someones_cubins").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_package("someones_cubins") == tmp_path / "someones_cubins"


def test_verify_reads_every_file_of_the_package(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = fill(site, OURS, CUBINS)
    lock = tmp_path / "cubins.lock"
    lock.write_text(lock_of().dump())
    command = ["verify", "--lock", str(lock), "--layer", "package", "--family", "remote", "--offline"]
    assert main(command) == ExitCode.OK
    assert "10 good copies, 0 damaged, 0 missing" in capsys.readouterr().out
    (own / PATHS[0].partition("/")[2]).unlink()
    assert main(command) == ExitCode.MISSING_OFFLINE
    assert f"missing: {PATHS[0]}" in capsys.readouterr().out
    (own / PATHS[1].partition("/")[2]).write_bytes(CUBINS[PATHS[2]])
    assert main(command) == ExitCode.INTEGRITY
    assert PATHS[1] in capsys.readouterr().out


def test_the_lock_names_the_package_that_carries_its_cubins() -> None:
    family = installed_lock().families["trtllm-gen"]
    assert family.package is not None and family.package.module == "flashinfer_cubin"
    assert family.repositories[0].endswith("/" + family.package.folder.removeprefix("cubins/"))


def test_package_in_the_lock_is_checked_and_kept() -> None:
    lock = lock_of()
    assert LockFile.parse(lock.dump()) == lock


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("module", "someones.cubins"),
        ("module", "../cubins"),
        ("module", ""),
        ("module", None),
        ("folder", "../../etc"),
        ("folder", "/etc"),
        ("folder", ""),
        ("folder", "a//b"),
        ("extra", "x"),
    ],
)
def test_package_in_the_lock_is_a_plain_name_and_a_folder_below(field: str, value: object) -> None:
    document = json.loads(lock_of().dump())
    document["families"]["remote"]["package"][field] = value
    with pytest.raises(LockFileError, match=rf"field families\.remote\.package\.{field}: "):
        LockFile.parse(json.dumps(document))
