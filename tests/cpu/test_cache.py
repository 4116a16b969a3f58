"""The cache: publishing, locks, sweeping, with faults at every step."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from synthetic import FAST, artifact_of, files_below, make_cubins

from fmha_dispatch import cache as cache_module
from fmha_dispatch.cache import Cache, publish
from fmha_dispatch.errors import StoreError

CUBINS = make_cubins(3, family="f")
PATHS = sorted(CUBINS)


def test_publish_replaces_the_inode(tmp_path: Path) -> None:
    """T1.18: a reader's open file never changes under it."""
    target = tmp_path / "x"
    publish(target, b"old", tmp_path / "tmp")
    with target.open("rb") as reader:
        for _ in range(50):
            publish(target, b"new", tmp_path / "tmp")
        assert reader.read() == b"old"
    assert target.read_bytes() == b"new"
    assert files_below(tmp_path) == ["x"]


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EMFILE])
def test_disk_faults_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    """Fault 17: a clear error, no partial object, no litter."""

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    if call == "write":
        monkeypatch.setattr(cache_module.os, "fdopen", _failing_fdopen(code))
    elif call == "mkdir":
        monkeypatch.setattr(Path, "mkdir", fail)
    else:
        monkeypatch.setattr(cache_module.os, call, fail)
    target = tmp_path / "objects/x"
    with pytest.raises(StoreError) as caught:
        publish(target, b"data", tmp_path / "tmp")
    monkeypatch.undo()
    assert os.strerror(code) in str(caught.value)
    assert ("4 bytes needed" in str(caught.value)) == (code == errno.ENOSPC)
    assert files_below(tmp_path) == []


def _failing_fdopen(code: int) -> Any:
    class Full:
        def __init__(self, descriptor: int, mode: str) -> None:
            self.descriptor = descriptor

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *arguments: object) -> None:
            os.close(self.descriptor)

        def write(self, data: bytes) -> None:
            os.write(self.descriptor, data[:2])
            raise OSError(code, os.strerror(code))

    return Full


def test_interrupt_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 22: SIGINT in the middle of a publish."""

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cache_module.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publish(tmp_path / "x", b"data", tmp_path / "tmp")
    assert files_below(tmp_path) == []


def test_sweep_takes_what_a_killed_process_left(tmp_path: Path) -> None:
    """T1.01 variant, fault 3: nothing of a dead process stays; nothing of a living one goes."""
    child = subprocess.Popen(["sleep", "60"])
    cache = Cache(tmp_path)
    (tmp_path / "tmp").mkdir()
    host = cache_module._host()
    files = {
        "living": f"{host}+{child.pid}+1",
        "own": f"{host}+{os.getpid()}+1",
        "foreign": "elsewhere+1+1",
        "old": "elsewhere+1+2",
        "odd": "x",
    }
    for name in files.values():
        (tmp_path / "tmp" / name).write_bytes(b"x")
    os.utime(tmp_path / "tmp" / files["old"], (0, 0))
    assert cache.sweep() == 1
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert cache.sweep() == 1
    assert set(files_below(tmp_path / "tmp")) == {files["own"], files["foreign"], files["odd"]}


def _put_many(root: str, path: str, data: bytes, barrier: Any, results: Any) -> None:
    artifact = artifact_of(path, data)
    barrier.wait()
    for _ in range(20):
        Cache(Path(root)).put(artifact, data)
    results.put(Cache(Path(root)).read(artifact) == data)


def test_writers_without_locks(tmp_path: Path) -> None:
    """T1.10b, fault 2: 8 writers of one object and no lock at all: all succeed, the object is whole, no litter."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(8), context.Queue()
    arguments = (str(tmp_path), PATHS[0], CUBINS[PATHS[0]], barrier, results)
    processes = [context.Process(target=_put_many, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [True] * 8
    for process in processes:
        process.join()
    artifact = artifact_of(PATHS[0], CUBINS[PATHS[0]])
    assert files_below(tmp_path) == [f"objects/{artifact.sha256[:2]}/{artifact.sha256}"]


def test_lock_file_is_never_unlinked(tmp_path: Path) -> None:
    """T1.10a: the inode stays, so that two processes never hold two locks of one name."""
    cache = Cache(tmp_path)
    artifact = artifact_of(PATHS[0], CUBINS[PATHS[0]])
    inodes = set()
    for _ in range(20):
        with cache.lock(artifact):
            inodes.add((tmp_path / "locks" / f"{artifact.sha256}.lock").stat().st_ino)
    assert len(inodes) == 1
    assert (tmp_path / "locks" / f"{artifact.sha256}.lock").exists()


def test_waiting_for_a_lock_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T1.10d: after the deadline the work goes on without the lock, and says so."""
    artifact = artifact_of(PATHS[0], CUBINS[PATHS[0]])
    limits = type(FAST)(lock_wait_s=0.3)
    with Cache(tmp_path).lock(artifact), caplog.at_level(logging.WARNING, logger="fmha_dispatch"):
        started = time.monotonic()
        with Cache(tmp_path, limits).lock(artifact):
            assert 0.2 < time.monotonic() - started < 5
    assert "without the lock" in caplog.text


def test_no_place_for_locks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T1.14: a cache that cannot be made locks nothing and stops nobody: the work is done, at once, and it is told."""
    place = tmp_path / "file"
    place.write_bytes(b"in the way")
    artifact = artifact_of(PATHS[0], CUBINS[PATHS[0]])
    inside = 0
    started = time.monotonic()
    with caplog.at_level(logging.DEBUG, logger="fmha_dispatch"), Cache(place).lock(artifact):
        inside += 1
        with Cache(place).lock(artifact):
            inside += 1
    assert inside == 2
    assert time.monotonic() - started < 5  # no wait for a lock that nobody holds
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG"]
    assert f"no lock for {artifact.path}" in caplog.text and "Not a directory" in caplog.text
    assert (files_below(tmp_path), place.read_bytes()) == (["file"], b"in the way")
    with pytest.raises(ZeroDivisionError), Cache(place).lock(artifact):
        raise ZeroDivisionError  # what the work raises is not taken for a fault of the lock


def test_object_that_is_a_link_is_refused(tmp_path: Path) -> None:
    """Fault 14: the cache follows no link to a file of somebody else."""
    artifact = artifact_of(PATHS[0], CUBINS[PATHS[0]])
    cache = Cache(tmp_path / "cache")
    victim = tmp_path / "victim"
    victim.write_bytes(CUBINS[PATHS[0]])
    cache.object_path(artifact).parent.mkdir(parents=True)
    cache.object_path(artifact).symlink_to(victim)
    with pytest.raises(StoreError):
        cache.read(artifact)
    cache.put(artifact, CUBINS[PATHS[0]])
    assert not cache.object_path(artifact).is_symlink()
    assert victim.read_bytes() == CUBINS[PATHS[0]]
