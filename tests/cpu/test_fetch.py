"""Fetching from a local server that misbehaves: success, or a named error within its bounds."""

from __future__ import annotations

import dataclasses
import email.utils
import errno
import http.client
import json
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_server import FaultServer, drip, reply, reset
from synthetic import FAST, make_cubin, make_cubins, make_lock, make_store

from fmha_dispatch import cache as cache_module
from fmha_dispatch.errors import ExitCode, FetchError, FmhaError, IntegrityError, StoreError
from fmha_dispatch.fetch import Fetcher
from fmha_dispatch.settings import Settings

CUBINS = make_cubins(3, size=20_000)
PATHS = sorted(CUBINS)
PATH, DATA = PATHS[0], CUBINS[PATHS[0]]
LOCK = make_lock(CUBINS)
ARTIFACT = LOCK.by_path[PATH]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer(CUBINS).running() as running:
        yield running


@pytest.fixture
def other() -> Iterator[FaultServer]:
    with FaultServer(CUBINS).running() as running:
        yield running


def fetch(*urls: str, **limits: Any) -> bytes:
    """One artifact from mirrors at `urls`, without a store."""
    settings = Settings(limits=dataclasses.replace(FAST, **limits))
    with Fetcher(settings) as fetcher:
        return fetcher.fetch(ARTIFACT, [f"{url}/{PATH}" for url in urls]).data


def test_fetched_once_then_cached(tmp_path: Path, server: FaultServer) -> None:
    for _ in range(3):
        assert make_store(LOCK, tmp_path, mirrors=[server.url]).get(ARTIFACT).data == DATA
    assert server.hits == {PATH: 1}
    assert server.headers["Accept-Encoding"] == "identity"


def test_passing_403_is_retried(tmp_path: Path, server: FaultServer, caplog: pytest.LogCaptureFixture) -> None:
    """T1.03a: 403 twice, then the file: three attempts, told in one line at the end."""
    server.scripts[PATH] = [reply(403), reply(403), reply(200, DATA)]
    with caplog.at_level(logging.INFO, logger="fmha_dispatch"):
        assert fetch(server.url) == DATA
    assert server.hits[PATH] == 3
    assert len(caplog.records) == 1
    assert caplog.text.count("HTTP 403") == 2


def test_lasting_403(server: FaultServer) -> None:
    """T1.03b: the host, the code, the number of tries and what to do, within the total deadline."""
    server.default = reply(403)
    with pytest.raises(FetchError) as caught:
        fetch(server.url)
    assert server.hits[PATH] == FAST.tries
    assert len(caught.value.attempts) == FAST.tries
    text = str(caught.value)
    assert "4 attempt(s)" in text and "HTTP 403" in text and server.host in text and PATH in text
    assert "FMHA_DISPATCH_MIRRORS" in text
    assert caught.value.exit_code == ExitCode.NETWORK


@pytest.mark.parametrize("status", [400, 401, 404, 405, 407, 410, 451, 206, 204, 304])
def test_not_retried(server: FaultServer, status: int) -> None:
    """T1.03c: a definite answer is not asked for again."""
    server.default = reply(status)
    with pytest.raises(FetchError, match=f"HTTP {status}"):
        fetch(server.url)
    assert server.hits[PATH] == 1


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_retried(server: FaultServer, status: int) -> None:
    server.scripts[PATH] = [reply(status), reply(200, DATA)]
    assert fetch(server.url) == DATA


def test_404_falls_to_the_next_mirror(server: FaultServer, other: FaultServer) -> None:
    server.default = reply(404)
    assert fetch(server.url, other.url) == DATA
    assert (server.hits[PATH], other.hits[PATH]) == (1, 1)


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        ("1", 1.0, 4.0),
        ("1000000000", 1.0, 4.0),
        ("date", 0.9, 4.0),
        ("-5", 0.0, 0.9),
        ("soon", 0.0, 0.9),
        ("0", 0.0, 0.9),
    ],
)
def test_retry_after(server: FaultServer, asked: str, least: float, most: float) -> None:
    """Fault 11: seconds, an HTTP date, nonsense, negative, far away: honoured up to the cap, here one second."""
    if asked == "date":
        asked = email.utils.formatdate(time.time() + 10, usegmt=True)
    server.scripts[PATH] = [reply(503, Retry_After=asked), reply(200, DATA)]
    started = time.monotonic()
    assert fetch(server.url, retry_after_s=1.0) == DATA
    assert least <= time.monotonic() - started < most


def test_wait_that_exceeds_the_deadline_is_not_begun(server: FaultServer, other: FaultServer) -> None:
    server.default = reply(503, Retry_After="60")
    started = time.monotonic()
    with pytest.raises(FetchError):
        fetch(server.url, total_s=5.0, retry_after_s=120.0)
    assert time.monotonic() - started < 2
    assert server.hits[PATH] == 1
    assert fetch(server.url, other.url, total_s=5.0, retry_after_s=120.0) == DATA


@pytest.mark.parametrize("percent", range(0, 100, 10))
def test_reset_at_each_tenth(server: FaultServer, percent: int) -> None:
    """Fault 11: the connection breaks anywhere; the next try brings all of it."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA)
    whole = head + DATA
    server.scripts[PATH] = [reset(whole[: len(whole) * percent // 100]), reply(200, DATA)]
    assert fetch(server.url) == DATA
    assert server.hits[PATH] == 2


@pytest.mark.parametrize(
    "answer",
    [
        reply(200, DATA[:-1]),
        reply(200, DATA + b"x"),
        reply(200, DATA, length=10),
        reply(200, b"", length=1 << 40),
        reply(200, b"<html>please log in</html>", Content_Type="text/html"),
        reply(200, b"<!doctype html>".ljust(len(DATA))),
        reply(200, CUBINS[PATHS[1]]),
        reply(200, b""),
        reset(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + DATA + b"x" * 100),
        reset(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (len(DATA) + 1) + DATA + b"x\r\n0\r\n\r\n"
        ),
    ],
)
def test_wrong_bytes(server: FaultServer, other: FaultServer, answer: Any) -> None:
    """Faults 7 and 12: truncated, oversized, another file, a login page: refused, not retried, next mirror."""
    server.default = answer
    with pytest.raises(IntegrityError, match="every mirror serves wrong bytes"):
        fetch(server.url)
    assert server.hits[PATH] == 1
    assert fetch(server.url, other.url) == DATA


def test_html_gets_a_hint(server: FaultServer) -> None:
    """T1.21: the error says what answered."""
    server.default = reply(200, b"<!doctype html>".ljust(len(DATA)))
    with pytest.raises(IntegrityError, match="HTML page"):
        fetch(server.url)


@pytest.mark.parametrize(
    "good",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + DATA,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(DATA) + DATA + b"\r\n0\r\n\r\n",
    ],
)
def test_body_without_length(server: FaultServer, good: bytes) -> None:
    server.default = reset(good)
    assert fetch(server.url) == DATA


def test_oversized_body_is_not_read(server: FaultServer) -> None:
    """Fault 7: at most size + 64 KiB are read of an endless body."""
    sent = 0

    def endless(handler: Any) -> None:
        nonlocal sent
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(10_000):
            sent += handler.connection.send(bytes(65536))

    server.default = endless
    with pytest.raises(IntegrityError):
        fetch(server.url)
    assert sent < 64 << 20  # what fits into socket buffers, not the 625 MiB on offer


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "deflate, gzip"])
@pytest.mark.parametrize("status", [200, 302])
def test_encoded_bodies_are_refused_by_header(server: FaultServer, encoding: str, status: int) -> None:
    """Fault 8: nothing is inflated, on a redirect's body neither."""
    bomb = bytes(1 << 20)
    server.default = reply(status, bomb, Content_Encoding=encoding, Location=f"{server.url}/gone")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FmhaError, match=r"Content-Encoding|redirects|wrong bytes"):
        fetch(server.url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


SLOW: dict[str, Any] = {"min_rate_after_s": 0.5, "min_bytes_per_s": 10_000.0, "try_s": 1.5, "read_s": 1.0}


@pytest.mark.parametrize(
    "answer",
    [
        drip(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA), 0.05, 20),
        drip(b"HTTP/1.1 200 OK\r\nX-Slow: ", 0.05, 20),
        drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", 0.05, 20),
        drip(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(DATA), 10, 20),
        drip(b"", 10, 20),
    ],
    ids=["body", "headers", "chunk-size", "silent-body", "silent"],
)
def test_slow_loris(server: FaultServer, other: FaultServer, answer: Any) -> None:
    """Fault 9, T1.21: a server that drips is left by rate and by deadline, whichever part it drips."""
    server.default = answer
    started = time.monotonic()
    assert fetch(server.url, other.url, tries=1, **SLOW) == DATA
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "ftp://host/x",
        "//elsewhere.example/x",
        "https://elsewhere.example/x",
        "http://user:secret@{host}/x",
        "",
        "http://[::1",
    ],
)
def test_redirects_elsewhere_are_refused(server: FaultServer, location: str) -> None:
    """Fault 10: another host, another scheme, credentials in the target."""
    server.default = reply(302, Location=location.format(host=server.host))
    with pytest.raises(FetchError) as caught:
        fetch(server.url)
    assert "secret" not in str(caught.value)
    assert sum(server.hits.values()) == 1


def test_redirect_within_the_host(server: FaultServer) -> None:
    server.scripts[PATH] = [reply(307, Location=f"/{PATHS[0]}?signed=1"), reply(200, DATA)]
    assert fetch(server.url) == DATA


def test_redirect_to_a_listed_mirror_leaves_credentials_behind(server: FaultServer, other: FaultServer) -> None:
    server.default = reply(302, Location=f"{other.url}/{PATH}")
    with_password = server.url.replace("http://", "http://user:secret@")
    assert fetch(with_password, other.url) == DATA
    assert "Authorization" in server.headers
    assert "Authorization" not in other.headers


def test_redirect_loops_end(server: FaultServer) -> None:
    server.default = reply(301, Location=f"/{PATH}")
    with pytest.raises(FetchError, match="more than 3 redirects"):
        fetch(server.url)
    assert server.hits[PATH] == 4


def test_netrc_stays_at_its_host(server: FaultServer, other: FaultServer, tmp_path: Path, monkeypatch: Any) -> None:
    """Fault 10: netrc credentials for one host never reach another."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine unrelated.example login user password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    server.default = reply(302, Location=f"{other.url}/{PATH}")
    assert fetch(server.url, other.url) == DATA
    assert "Authorization" not in {**server.headers, **other.headers}


def test_credentials_never_show(server: FaultServer, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 27: userinfo and signed queries stay out of logs, messages and JSON."""
    server.default = reply(500)
    base = server.url.replace("http://", "http://user:secret@")
    with caplog.at_level(logging.DEBUG, logger="fmha_dispatch"), pytest.raises(FetchError) as caught:
        settings = Settings(limits=FAST)
        with Fetcher(settings) as fetcher:
            fetcher.fetch(ARTIFACT, [f"{base}/{PATH}?X-Signature=secret", f"http://user:secret@127.0.0.1:9/{PATH}"])
    shown = caplog.text + str(caught.value) + json.dumps(caught.value.to_json())
    assert "secret" not in shown
    assert "***@" in shown


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="no connection") as caught:
        fetch("http://127.0.0.1:9", tries=2)
    assert len(caught.value.attempts) == 2


CERTIFICATE = Path(__file__).parents[1] / "data" / "localhost.pem"


@pytest.fixture
def tls_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(CERTIFICATE))
    with FaultServer(CUBINS, CERTIFICATE).running() as running:
        yield running


def test_custom_ca_bundle(tls_server: FaultServer) -> None:
    assert fetch(tls_server.url) == DATA


def test_untrusted_certificate_is_named(tls_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1.21: a TLS failure says so, at once."""
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with pytest.raises(FetchError, match=r"TLS: .*certificate"):
        fetch(tls_server.url)
    assert tls_server.sockets <= 1


def test_no_redirect_from_https_to_http(tls_server: FaultServer, server: FaultServer) -> None:
    tls_server.default = reply(302, Location=f"{server.url}/{PATH}")
    with pytest.raises(FetchError, match="from https to http"):
        fetch(tls_server.url, f"{server.url}/absent")
    assert fetch(tls_server.url, server.url) == DATA


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_slow_loris_over_tls(tls_server: FaultServer, server: FaultServer, head: bytes) -> None:
    """Fault 9: a record now and then."""
    tls_server.default = drip(head, 0.05, 20)
    started = time.monotonic()
    assert fetch(tls_server.url, server.url, tries=1, **SLOW) == DATA
    assert time.monotonic() - started < 3


def test_proxy_from_the_environment(server: FaultServer, other: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1.21: proxies and exceptions from them as other programs take them; a proxy that wants a login is named."""
    far = f"http://mirror.example/{PATH}"
    other.scripts[far] = [reply(200, DATA), reply(407)]
    monkeypatch.setenv("http_proxy", other.url)
    assert fetch("http://mirror.example") == DATA
    with pytest.raises(FetchError, match="HTTP 407"):
        fetch("http://mirror.example")
    assert other.hits == {far: 2}
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert fetch(server.url) == DATA
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(FetchError, match="proxy: "):
        fetch("http://mirror.example", tries=1)


def test_total_deadline_spans_mirrors(server: FaultServer, other: FaultServer) -> None:
    """T1.03b: a total deadline, not per try only."""
    server.default = other.default = drip(b"", 10, 20)
    started = time.monotonic()
    with pytest.raises(FetchError, match=r"timed out|too slow|no time left"):
        fetch(server.url, other.url, total_s=1.0, read_s=0.4)
    assert time.monotonic() - started < 2


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
    assert store.get(second).data == CUBINS[PATHS[1]]


def test_bad_mirror_is_asked_once_in_a_run(tmp_path: Path, server: FaultServer, other: FaultServer) -> None:
    """Fault 12: a mirror that served wrong bytes is skipped for the rest of the run."""
    cubins = make_cubins(20)
    lock = make_lock(cubins)
    server.default = reply(200, make_cubin(code=b"other"))
    other.files.update(cubins)
    store = make_store(lock, tmp_path, mirrors=[server.url, other.url])
    assert store.fetch_all(lock.artifacts) == {}
    assert sum(server.hits.values()) <= 4  # one for each worker that had begun


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


def test_nothing_but_fetch_opens_connections() -> None:
    """Network code lives in one file."""
    package = Path(__file__).parents[2] / "fmha_dispatch"
    words = ("import requests", "import urllib3", "http.client", "urlopen", "socket.create_connection")
    found = {path.name for path in package.rglob("*.py") if any(word in path.read_text() for word in words)}
    assert found == {"fetch.py"}
    assert http.client  # the standard library's, for the server
