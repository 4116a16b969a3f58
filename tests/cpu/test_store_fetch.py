"""Store and network together: the cache is filled once, races and faults included."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fault_server import FaultServer, drip, reply
from synthetic import FAST, REMOTE, make_cubin, make_cubins, make_lock, make_store

from fmha_dispatch import cache as cache_module
from fmha_dispatch.errors import ExitCode, FetchError, IntegrityError, StoreError

PATHS = sorted(REMOTE)
PATH, DATA = PATHS[0], REMOTE[PATHS[0]]
LOCK = make_lock(REMOTE)
ARTIFACT = LOCK.by_path[PATH]


def test_fetched_once_then_cached(tmp_path: Path, server: FaultServer) -> None:
    for _ in range(3):
        assert make_store(LOCK, tmp_path, mirrors=[server.url]).get(ARTIFACT).data == DATA
    assert server.hits == {PATH: 1}
    assert server.headers["Accept-Encoding"] == "identity"


def test_failure_names_artifact_then_success_in_the_same_process(tmp_path: Path, server: FaultServer) -> None:
    """T1.02: a failed fetch of B names B, its URL and the attempts; a later fetch of B works."""
    store = make_store(LOCK, tmp_path, mirrors=[server.url])
    assert store.get(ARTIFACT).data == DATA
    second = LOCK.by_path[PATHS[1]]
    server.scripts[PATHS[1]] = [reply(500)]
    with pytest.raises(FetchError) as caught:
        store.get(second)
    assert second.path in str(caught.value)
    assert f"{server.url}/{second.path}" in caught.value.attempts[0]
    del server.scripts[PATHS[1]]
    assert store.get(second).data == REMOTE[PATHS[1]]


def test_one_damaged_file_of_a_mirror_is_one_error(tmp_path: Path, server: FaultServer) -> None:
    """Every body is hashed: one flipped bit costs its own artifact, in this run and in the next."""
    cubins = make_cubins(30)
    lock = make_lock(cubins)
    damaged = sorted(cubins)[0]
    server.files.update(cubins | {damaged: cubins[damaged][:-1] + b"\xff"})
    for _ in range(2):
        errors = make_store(lock, tmp_path, mirrors=[server.url]).fetch_all(lock.artifacts)
        assert list(errors) == [damaged]
        assert isinstance(errors[damaged], IntegrityError) and damaged in str(errors[damaged])
    assert server.hits == {path: 2 if path == damaged else 1 for path in cubins}


def test_many_damaged_files_among_good_ones(tmp_path: Path, server: FaultServer) -> None:
    """A mirror that gave anything right is asked to the end."""
    cubins = make_cubins(40)
    lock = make_lock(cubins)
    damaged = sorted(cubins)[1::2]
    server.files.update(cubins | {path: b"rotten" for path in damaged})
    assert list(make_store(lock, tmp_path, mirrors=[server.url]).fetch_all(lock.artifacts)) == damaged


def test_two_mirrors_of_one_host(tmp_path: Path, server: FaultServer) -> None:
    """The host of a bad mirror says nothing about its neighbour."""
    cubins = make_cubins(30)
    lock = make_lock(cubins)
    server.files = {f"bad/{path}": b"rotten" for path in cubins} | {f"good/{path}": cubins[path] for path in cubins}
    store = make_store(lock, tmp_path, mirrors=[f"{server.url}/bad", f"{server.url}/good"])
    assert store.fetch_all(lock.artifacts) == {}


def test_bad_mirror_is_soon_left_alone(tmp_path: Path, server: FaultServer, other: FaultServer) -> None:
    """Fault 12: a mirror that gives several artifacts wrong and none right is skipped for the rest of the run."""
    cubins = make_cubins(20)
    lock = make_lock(cubins)
    server.default = reply(200, make_cubin(code=b"other"))
    other.files.update(cubins)
    store = make_store(lock, tmp_path, mirrors=[server.url, other.url])
    assert store.fetch_all(lock.artifacts) == {}
    assert sum(server.hits.values()) <= FAST.wrong_artifacts + 3  # those of the other workers that had begun
    errors = make_store(lock, tmp_path / "alone", mirrors=[server.url]).fetch_all(lock.artifacts)
    assert len(errors) == 20
    for path, error in errors.items():
        assert isinstance(error, IntegrityError) and path in error.message


def test_not_cached_is_a_warning_once(
    tmp_path: Path, server: FaultServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """T1.14: read-only or full disk: verified in memory and used, one warning."""
    (tmp_path / "cache").write_bytes(b"in the way")
    store = make_store(LOCK, tmp_path, mirrors=[server.url])
    with caplog.at_level(logging.WARNING, logger="fmha_dispatch"):
        assert store.get(ARTIFACT).data == DATA
        assert store.get(ARTIFACT).data == DATA
    assert sum("not cached" in record.message for record in caplog.records) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    with pytest.raises(StoreError):
        store.fetch_all([ARTIFACT])


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ESTALE, errno.ENOENT, errno.ENOSPC])
def test_rename_loser_uses_its_own_bytes(
    tmp_path: Path, server: FaultServer, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """T1.10c, fault 20: on a network file system the winner's file may not be visible yet; nobody looks for it."""

    def lose(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache_module.os, "rename", lose)
    assert make_store(LOCK, tmp_path, mirrors=[server.url]).get(ARTIFACT).data == DATA
    assert list((tmp_path / "cache/tmp").iterdir()) == []


def test_no_cache_folder_at_all(tmp_path: Path, server: FaultServer) -> None:
    """T1.14: HOME unset."""
    store = make_store(LOCK, tmp_path, mirrors=[server.url], cache_dir=None)
    assert store.get(ARTIFACT).data == DATA
    with pytest.raises(StoreError, match="no cache folder"):
        store.fetch_all([ARTIFACT])
    assert list(tmp_path.iterdir()) == []


def test_many_artifacts_over_few_sockets(tmp_path: Path, server: FaultServer, caplog: pytest.LogCaptureFixture) -> None:
    """T1.03d, T1.19: 200 blobs, one session, bounded connections, few log lines; again: none."""
    cubins = make_cubins(200)
    lock = make_lock(cubins)
    server.files.update(cubins)
    store = make_store(lock, tmp_path, mirrors=[server.url])
    done = []
    with caplog.at_level(logging.INFO, logger="fmha_dispatch"):
        assert store.fetch_all(lock.artifacts, done.append) == {}
    assert len(done) == 200
    assert server.sockets <= 4
    assert set(server.hits.values()) == {1}
    assert len(caplog.records) <= 5
    assert make_store(lock, tmp_path, offline=True).fetch_all(lock.artifacts) == {}


def test_partial_failure_is_listed(tmp_path: Path, server: FaultServer) -> None:
    server.scripts[PATHS[1]] = [reply(404)]
    store = make_store(LOCK, tmp_path, mirrors=[server.url])
    errors = store.fetch_all(LOCK.artifacts)
    assert list(errors) == [PATHS[1]]
    assert isinstance(errors[PATHS[1]], FetchError)


def _fetch_at_barrier(root: str, url: str, barrier: Any, results: Any) -> None:
    store = make_store(LOCK, Path(root), mirrors=[url])
    import fmha_dispatch.fetch  # noqa: F401  (its import is not part of the race)

    barrier.wait()
    started = time.monotonic()
    results.put((store.get(ARTIFACT).sha256, time.monotonic() - started))


def test_cold_race_fetches_once(tmp_path: Path, server: FaultServer) -> None:
    """T1.01, fault 1: 8 processes, an empty cache, 300 ms a GET: one GET, identical bytes, less than 3 GETs' time."""

    def slow(handler: Any) -> None:
        time.sleep(0.3)
        reply(200, DATA)(handler)

    server.default = slow
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(8), context.Queue()
    arguments = (str(tmp_path), server.url, barrier, results)
    processes = [context.Process(target=_fetch_at_barrier, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert {digest for digest, _ in answers} == {ARTIFACT.sha256}
    assert server.hits[PATH] == 1
    assert max(seconds for _, seconds in answers) < 0.9 * 3  # three GETs' time on a loaded machine
    assert list((tmp_path / "cache" / "tmp").iterdir()) == []


def test_killed_lock_holder(tmp_path: Path, server: FaultServer) -> None:
    """T1.01 variant: SIGKILL in the middle of the body; another process finishes without any clean-up."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA)
    server.scripts[PATH] = [drip(head + DATA[: len(DATA) // 2], 1, 20), reply(200, DATA)]
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(1), context.Queue()
    victim = context.Process(target=_fetch_at_barrier, args=(str(tmp_path), server.url, barrier, results))
    victim.start()
    deadline = time.monotonic() + 30
    while server.hits[PATH] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.kill()
    started = time.monotonic()
    assert make_store(LOCK, tmp_path, mirrors=[server.url]).get(ARTIFACT).data == DATA
    assert time.monotonic() - started < 3
    victim.join()


def test_interrupt_during_fetch(tmp_path: Path, server: FaultServer) -> None:
    """Fault 22: SIGINT ends the command with 130 soon, and no temporary file stays."""
    server.default = drip(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA), 0.5, 30)
    (tmp_path / "lock").write_text(LOCK.dump())
    command = [sys.executable, "-m", "fmha_dispatch.cli", "fetch", "--lock", str(tmp_path / "lock")]
    command += ["--cache-dir", str(tmp_path / "cache"), "--mirror", server.url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    deadline = time.monotonic() + 30
    while sum(server.hits.values()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == ExitCode.INTERRUPTED, stderr
    assert time.monotonic() - started < 5
    assert not list((tmp_path / "cache").rglob("tmp/*"))


def test_without_a_network_thousands_fail_as_soon_as_a_few(tmp_path: Path) -> None:
    """A base URL that answers for none of the first artifacts is not asked for the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    cubins = make_cubins(200, family="f")
    lock = make_lock(cubins)
    started = time.monotonic()
    errors = make_store(lock, tmp_path, mirrors=[url]).fetch_all(lock.artifacts)
    assert len(errors) == 200 and all(isinstance(error, FetchError) for error in errors.values())
    skipped = [error for error in errors.values() if "no answer for" in str(error)]
    assert len(skipped) >= 200 - 4 - 4  # four that count, and those under way in other threads
    assert time.monotonic() - started < 30
