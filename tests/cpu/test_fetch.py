"""Fetching from a local server that misbehaves: success, or a named error within its bounds."""

from __future__ import annotations

import dataclasses
import email.utils
import http.client
import json
import logging
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_server import FaultServer, drip, reply, reset
from synthetic import FAST, REMOTE, make_lock

from fmha_dispatch.errors import ExitCode, FetchError, FmhaError, IntegrityError
from fmha_dispatch.fetch import Fetcher
from fmha_dispatch.settings import Settings

PATHS = sorted(REMOTE)
PATH, DATA = PATHS[0], REMOTE[PATHS[0]]
LOCK = make_lock(REMOTE)
ARTIFACT = LOCK.by_path[PATH]


def fetch(*urls: str, **limits: Any) -> bytes:
    """One artifact from mirrors at `urls`, without a store."""
    settings = Settings(limits=dataclasses.replace(FAST, **limits))
    with Fetcher(settings) as fetcher:
        return fetcher.fetch(ARTIFACT, [f"{url}/{PATH}" for url in urls]).data


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
        reply(200, REMOTE[PATHS[1]]),
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


def test_redirect_within_the_host_keeps_its_credentials(server: FaultServer) -> None:
    server.scripts[PATH] = [reply(302, Location=f"/{PATH}?signed=1"), reply(200, DATA)]
    assert fetch(server.url.replace("http://", "http://user:secret@")) == DATA
    assert "Authorization" in server.headers


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
    with FaultServer(REMOTE, CERTIFICATE).running() as running:
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


def test_nothing_but_fetch_opens_connections() -> None:
    """Network code lives in one file."""
    package = Path(__file__).parents[2] / "fmha_dispatch"
    words = ("import requests", "import urllib3", "http.client", "urlopen", "socket.create_connection")
    found = {path.name for path in package.rglob("*.py") if any(word in path.read_text() for word in words)}
    assert found == {"fetch.py"}
    assert http.client  # the standard library's, for the server
