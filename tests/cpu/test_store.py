"""Layers, cache and publishing, with faults. Everything here runs without a network: sockets raise."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from synthetic import (
    files_below,
    make_cubin,
    make_cubins,
    make_lock,
    make_store,
    write_folder,
    write_pack,
)

from fmha_dispatch.cache import Cache, publish
from fmha_dispatch.cubin import VerifiedCubin
from fmha_dispatch.errors import ArtifactMissing, ExitCode, IntegrityError
from fmha_dispatch.lockfile import Artifact
from fmha_dispatch.store import Store, join_url

CUBINS = make_cubins(3, family="f")
PATHS = sorted(CUBINS)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 21, T1.08: any attempt to connect or to look a name up fails the test."""

    def refuse(*arguments: object) -> None:
        raise AssertionError(f"the network was touched: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def get(store: Store, path: str = PATHS[0]) -> VerifiedCubin:
    return store.get(store.lock.by_path[path])


def test_layers_in_order(tmp_path: Path) -> None:
    """T1.13: explicit folder, then the environment's, then the pack, then the cache, then a file:// mirror."""
    lock = make_lock(CUBINS, pack="f.zip")
    mirror = write_folder(tmp_path / "mirror", CUBINS)
    options: dict[str, Any] = {"mirrors": [f"file://{mirror}"]}
    artifact = lock.by_path[PATHS[0]]

    def where() -> str | None:
        return make_store(lock, tmp_path, **options).local(artifact).source

    assert where() == f"mirror {mirror}"
    Cache(tmp_path / "cache").put(artifact, CUBINS[PATHS[0]])
    assert where() == f"cache {tmp_path / 'cache'}"
    write_pack(tmp_path / "data" / "f.zip", CUBINS)
    assert where() == "pack f.zip"
    options["cubin_dir"] = write_folder(tmp_path / "env", CUBINS)
    assert where() == f"folder {tmp_path / 'env'}"
    options["folder"] = write_folder(tmp_path / "explicit", CUBINS)
    assert where() == f"folder {tmp_path / 'explicit'}"
    assert get(make_store(lock, tmp_path, **options)).data == CUBINS[PATHS[0]]


def test_full_store_needs_no_network(tmp_path: Path) -> None:
    """T1.08: everything local: no connection, no name look-up, whether offline is set or not."""
    lock = make_lock(CUBINS, repositories=("https://host.example/x",))
    store = make_store(lock, tmp_path, folder=write_folder(tmp_path / "d", CUBINS))
    assert [get(store, path).data for path in PATHS] == [CUBINS[path] for path in PATHS]
    assert store.fetch_all(lock.artifacts) == {}


def test_offline_lists_all_that_is_missing(tmp_path: Path) -> None:
    """T1.09: under 50 ms, all missing artifacts at once, and the command that gets them."""
    lock = make_lock(CUBINS, repositories=("https://host.example/x",))
    store = make_store(lock, tmp_path, offline=True, folder=write_folder(tmp_path / "d", {PATHS[1]: CUBINS[PATHS[1]]}))
    started = time.thread_time()
    with pytest.raises(ArtifactMissing) as caught:
        store.require(lock.artifacts)
    assert time.thread_time() - started < 0.05
    assert caught.value.missing == (PATHS[0], PATHS[2])
    assert "2 cubin(s) are not on this machine and it is offline" in str(caught.value)
    assert "FMHA_DISPATCH_OFFLINE=0 fmha-dispatch fetch --family f" in str(caught.value)
    assert caught.value.exit_code == ExitCode.MISSING_OFFLINE
    with pytest.raises(ArtifactMissing, match=f"--path {PATHS[0]}"):
        get(store)


def test_damaged_and_missing_together(tmp_path: Path) -> None:
    """Damage decides the exit code; the list is complete all the same."""
    lock = make_lock(CUBINS)
    store = make_store(lock, tmp_path, folder=write_folder(tmp_path / "d", {PATHS[1]: b"rotten"}))
    with pytest.raises(IntegrityError) as caught:
        store.require(lock.artifacts)
    assert all(path in str(caught.value) for path in PATHS)
    store = make_store(lock, tmp_path, folder=write_folder(tmp_path / "d", CUBINS))
    store.require(lock.artifacts)


def test_missing_without_any_url_does_not_suggest_a_fetch(tmp_path: Path) -> None:
    with pytest.raises(ArtifactMissing, match="reinstall") as caught:
        get(make_store(make_lock(CUBINS), tmp_path))
    assert "fmha-dispatch fetch" not in str(caught.value)


@pytest.mark.parametrize("damage", ["bit", "short", "long", "empty", "swapped", "html"])
@pytest.mark.parametrize("layer", ["folder", "pack", "cache"])
def test_damaged_layer_is_passed_over(
    tmp_path: Path, layer: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault 5: caught before a load; the next layer serves; a warning once; alone it is an integrity error."""
    path = PATHS[0]
    good = CUBINS[path]
    bad = {
        "bit": good[:100] + bytes([good[100] ^ 1]) + good[101:],
        "short": good[:-1],
        "long": good + b"\0",
        "empty": b"",
        "swapped": CUBINS[PATHS[1]],
        "html": b"<html>".ljust(len(good)),
    }[damage]
    lock = make_lock(CUBINS, pack="f.zip")
    options: dict[str, Any] = {}
    if layer == "folder":
        options["folder"] = write_folder(tmp_path / "d", {path: bad})
    elif layer == "pack":
        write_pack(tmp_path / "data" / "f.zip", {path: bad})
    else:
        publish(tmp_path / "cache/objects" / lock.by_path[path].sha256[:2] / lock.by_path[path].sha256, bad, tmp_path)
    with (
        caplog.at_level(logging.WARNING, logger="fmha_dispatch"),
        pytest.raises(IntegrityError, match=f"{layer}.*{path}: wrong"),
    ):
        get(make_store(lock, tmp_path, **options))
    mirror = write_folder(tmp_path / "mirror", CUBINS)
    caplog.clear()
    store = make_store(lock, tmp_path, mirrors=[f"file://{mirror}"], **options)
    with caplog.at_level(logging.WARNING, logger="fmha_dispatch"):
        assert get(store).data == good
        assert get(store).data == good
    # The first store moved the damaged object out of the cache.
    assert len(caplog.records) == (0 if layer == "cache" else 1)


def test_quarantine_keeps_the_evidence(tmp_path: Path) -> None:
    lock = make_lock(CUBINS)
    store = make_store(lock, tmp_path)
    assert store.cache is not None
    target = store.cache.object_path(lock.by_path[PATHS[0]])
    publish(target, b"rotten", tmp_path / "cache/tmp")
    with pytest.raises(IntegrityError):
        get(store)
    assert not target.exists()
    assert [path.read_bytes() for path in (tmp_path / "cache/quarantine").iterdir()] == [b"rotten"]


def test_damaged_packs(tmp_path: Path) -> None:
    """No damage of a ZIP archive escapes as anything but a typed error, and no bomb is unpacked."""
    lock = make_lock(CUBINS, pack="f.zip")
    pack = write_pack(tmp_path / "data" / "f.zip", CUBINS)
    sound = pack.read_bytes()
    directory = sound.index(b"PK\x01\x02")
    damages = [(position, 0xFF) for position in range(0, directory, 7)]
    damages += [(position, 1 << bit) for position in range(directory, len(sound)) for bit in range(8)]
    for position, flip in damages:
        pack.write_bytes(sound[:position] + bytes([sound[position] ^ flip]) + sound[position + 1 :])
        store = make_store(lock, tmp_path)
        for path in PATHS if flip == 0xFF else PATHS[:1]:
            with contextlib.suppress(IntegrityError):
                store.sources[0].size(lock.by_path[path])
            with contextlib.suppress(IntegrityError, ArtifactMissing):
                assert get(store, path).data == CUBINS[path]
    write_pack(pack, {PATHS[0]: bytes(200 << 20)})
    started = time.perf_counter()
    with pytest.raises(IntegrityError, match="wrong size"):
        get(make_store(lock, tmp_path))
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_pack_of_another_compression_is_not_unpacked(tmp_path: Path, method: int) -> None:
    """Their decoders report damage in ways of their own and may ask for gigabytes."""
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "data" / "f.zip", "w", method) as archive:
        archive.writestr(PATHS[0], CUBINS[PATHS[0]])
    with pytest.raises(IntegrityError, match="damaged: compression method"):
        get(make_store(make_lock(CUBINS, pack="f.zip"), tmp_path))


@pytest.mark.parametrize("thing", ["folder", "fifo", "unreadable"])
def test_odd_files_do_not_stop_other_layers(tmp_path: Path, thing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "odd" / PATHS[0]
    odd.parent.mkdir(parents=True)
    if thing == "folder":
        odd.mkdir()
    elif thing == "fifo":
        os.mkfifo(odd)
    else:
        odd.write_bytes(b"x")
        true_open = os.open

        def deny(path: Any, *arguments: Any, **options: Any) -> int:
            if Path(path) == odd:
                raise PermissionError(errno.EACCES, "Permission denied")
            return true_open(path, *arguments, **options)

        monkeypatch.setattr(os, "open", deny)
    lock = make_lock(CUBINS)
    with pytest.raises(ArtifactMissing, match=r"regular file|Permission denied"):
        get(make_store(lock, tmp_path, folder=tmp_path / "odd"))
    mirror = write_folder(tmp_path / "mirror", CUBINS)
    store = make_store(lock, tmp_path, folder=tmp_path / "odd", mirrors=[f"file://{mirror}"])
    assert get(store).data == CUBINS[PATHS[0]]


def test_package_folder_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1.13: no write syscall under the package's data, whatever is looked for."""
    lock = make_lock(CUBINS, pack="f.zip")
    write_pack(tmp_path / "data" / "f.zip", {PATHS[0]: CUBINS[PATHS[0]], PATHS[1]: b"bad"})
    before = {path: path.stat() for path in (tmp_path / "data").rglob("*")}
    true_open = os.open

    def watch(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        assert not (writes and str(path).startswith(str(tmp_path / "data"))), path
        return true_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", watch)
    store = make_store(lock, tmp_path)
    store.local(lock.by_path[PATHS[1]])
    assert get(store).data == CUBINS[PATHS[0]]
    assert {path: path.stat() for path in (tmp_path / "data").rglob("*")} == before


def test_reading_creates_nothing(tmp_path: Path) -> None:
    """T1.14: looking for a cubin does not touch the disk."""
    with pytest.raises(ArtifactMissing):
        get(make_store(make_lock(CUBINS), tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_two_locks_share_one_cache(tmp_path: Path) -> None:
    """T1.12, T1.15: same path, other bytes: each version finds its own; equal bytes are one object."""
    other = {**CUBINS, PATHS[0]: make_cubin(code=b"another version")}
    cache = Cache(tmp_path / "cache")
    stores = [make_store(make_lock(cubins), tmp_path) for cubins in (CUBINS, other)]
    for cubins, store in zip((CUBINS, other), stores, strict=True):
        for path, data in cubins.items():
            cache.put(store.lock.by_path[path], data)
    for _ in range(2):
        for cubins, store in zip((CUBINS, other), stores, strict=True):
            assert all(get(store, path).data == data for path, data in cubins.items())
    assert len(files_below(tmp_path / "cache/objects")) == 4


def test_bytes_hashed_are_the_bytes_returned(tmp_path: Path) -> None:
    """Fault 16: a file that changes all the time gives good bytes or an error, never others."""
    lock = make_lock(CUBINS)
    folder = write_folder(tmp_path / "d", CUBINS)
    good = CUBINS[PATHS[0]]
    bad = good[:-1] + b"\xff"
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for data in (bad, good):
                publish(folder / PATHS[0], data, tmp_path / "tmp")

    thread = threading.Thread(target=swap)
    thread.start()
    seen = {True: 0, False: 0}
    try:
        store = make_store(lock, tmp_path, folder=folder)
        for _ in range(1000):
            found = store.local(lock.by_path[PATHS[0]])
            seen[found.cubin is not None] += 1
            assert found.cubin is None or found.cubin.data == good
    finally:
        stop.set()
        thread.join()
    assert seen[True]


def test_copy_to_makes_a_folder_layer(tmp_path: Path) -> None:
    """T1.04: what `fetch --dest` writes serves as FMHA_DISPATCH_CUBIN_DIR, alone and offline."""
    lock = make_lock(CUBINS)
    store = make_store(lock, tmp_path, folder=write_folder(tmp_path / "d", CUBINS))
    store.copy_to(tmp_path / "dest", lock.artifacts)
    assert files_below(tmp_path / "dest") == PATHS
    alone = make_store(lock, tmp_path / "elsewhere", offline=True, cubin_dir=tmp_path / "dest")
    assert all(get(alone, path).data == CUBINS[path] for path in PATHS)


@pytest.mark.parametrize(
    ("base", "joined"),
    [
        ("https://h", "https://h/f/k.cubin"),
        ("https://h/", "https://h/f/k.cubin"),
        ("https://h/a/b", "https://h/a/b/f/k.cubin"),
        ("https://h/a/b//", "https://h/a/b/f/k.cubin"),
        ("https://h:8443/a?token=x%2Fy", "https://h:8443/a/f/k.cubin?token=x%2Fy"),
        ("https://h/a#frag", "https://h/a/f/k.cubin"),
        ("http://u:p@h/a/", "http://u:p@h/a/f/k.cubin"),
    ],
)
def test_join_url(base: str, joined: str) -> None:
    """T1.17: never a doubled, never a lost slash; a signed query stays at the end."""
    assert join_url(base, "f/k.cubin") == joined


def test_repositories_take_paths_within_the_family(tmp_path: Path) -> None:
    lock = make_lock(CUBINS, repositories=("https://repo.example/commit/fmha",))
    store = make_store(lock, tmp_path, mirrors=["https://mirror.example/all/"])
    assert store.urls(lock.by_path[PATHS[0]]) == [
        f"https://mirror.example/all/{PATHS[0]}",
        f"https://repo.example/commit/fmha/{PATHS[0].partition('/')[2]}",
    ]


def test_file_mirror_with_escapes(tmp_path: Path) -> None:
    mirror = write_folder(tmp_path / "with space", CUBINS)
    store = make_store(make_lock(CUBINS), tmp_path, mirrors=["file://" + str(mirror).replace(" ", "%20") + "/"])
    assert get(store).data == CUBINS[PATHS[0]]


def test_unexpected_errors_propagate(tmp_path: Path) -> None:
    """T1.19: a bug is not taken for a miss."""

    class Broken:
        kind = name = "broken"

        def size(self, artifact: Artifact) -> int | None:
            return None

        def read(self, artifact: Artifact) -> bytes | None:
            raise TypeError("bug")

    store = make_store(make_lock(CUBINS), tmp_path)
    store.sources.insert(0, Broken())
    with pytest.raises(TypeError, match="bug"):
        get(store)
