"""Artifacts over HTTP(S). The only file that opens connections; it decides how often, how long and from whom."""

from __future__ import annotations

import contextlib
import email.utils
import logging
import random
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import requests
import requests.adapters
import urllib3
import urllib3.connection
import urllib3.connectionpool

from fmha_dispatch.cubin import VerifiedCubin, verify
from fmha_dispatch.errors import FetchError, FmhaError, IntegrityError
from fmha_dispatch.lockfile import Artifact
from fmha_dispatch.settings import Settings, redact, redact_text

_log = logging.getLogger("fmha_dispatch")

_CHUNK = 64 << 10

# What a server may mean to answer otherwise in a moment. 403 is among them: public artifact hosts use it for their
# rate limit, for files that do exist.
_PASSING = frozenset({403, 408, 425, 429, 500, 502, 503, 504})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class _Failure(Exception):
    """One request that brought nothing.

    Attributes:
        passing: the same request may succeed later.
        wrong: what came was not the artifact; asking again would bring the same.
        unreached: no answer came at all.
        wait_s: what the server asked to wait.
    """

    def __init__(
        self,
        reason: str,
        *,
        passing: bool = False,
        wrong: IntegrityError | None = None,
        unreached: bool = False,
        wait_s: float | None = None,
    ) -> None:
        self.reason = reason
        self.passing = passing
        self.wrong = wrong
        self.unreached = unreached
        self.wait_s = wait_s
        super().__init__(reason)


@dataclass(frozen=True)
class _Tried:
    url: str
    failure: _Failure

    def __str__(self) -> str:
        return f"{redact(self.url)}: {self.failure.reason}"


class Fetcher:
    """A session with a server or several; close it after use. Usable from several threads.

    Every request is bounded by the settings' limits: redirects, size, seconds a try and in total, and a least rate.
    """

    def __init__(self, settings: Settings, *, connections: int = 1) -> None:
        self.limits = settings.limits
        self._cancelled = threading.Event()
        self._wrong: dict[str, set[str]] = {}  # base URL -> artifacts that came as other bytes
        self._unreached: dict[str, set[str]] = {}  # base URL -> artifacts for which no answer came
        self._sound: set[str] = set()  # base URLs that gave a verified artifact
        self._deadline = _Deadline()
        self._session = _session(self._deadline, connections)

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.cancel()
        self._session.close()

    def cancel(self) -> None:
        """Makes requests under way in other threads fail soon."""
        self._cancelled.set()
        self._deadline.cut()

    def fetch(self, artifact: Artifact, urls: Sequence[str]) -> VerifiedCubin:
        """The first verified bytes that one of `urls` gives.

        Every body is checked, so wrong bytes of one URL say nothing about the next. Only a base URL that gave several
        artifacts wrong and none right, as a login page does, or answered for none of several, is not asked again by
        this session: without a network, thousands of artifacts fail as soon as a few.

        Raises:
            IntegrityError: servers answered, but every answer was wrong bytes.
            FetchError: nothing was delivered, with each attempt.
        """
        started = time.monotonic()
        until = started + self.limits.total_s
        hosts = frozenset(_origin(url)[1] for url in urls)
        tried: list[_Tried] = []
        for url in urls:
            base = _base(url, artifact)
            if base not in self._sound and (wrong := len(self._wrong.get(base, ()))) >= self.limits.wrong_artifacts:
                unasked = IntegrityError(f"{artifact.path}: not asked for", asked=f"sha256 {artifact.sha256}")
                tried.append(_Tried(url, _Failure(f"skipped: {wrong} artifacts wrong, none right", wrong=unasked)))
                continue
            unreached = len(self._unreached.get(base, ()))
            if base not in self._sound and unreached >= self.limits.unreached_artifacts:
                tried.append(_Tried(url, _Failure(f"skipped: no answer for {unreached} artifacts before")))
                continue
            for attempt in range(self.limits.tries):
                try:
                    data = self._request(url, artifact, hosts, until)
                    cubin = self._verified(data, artifact)
                except _Failure as failure:
                    tried.append(_Tried(url, failure))
                    if failure.wrong:
                        self._wrong.setdefault(base, set()).add(artifact.path)
                    if not failure.passing or attempt + 1 == self.limits.tries:
                        if failure.unreached:
                            self._unreached.setdefault(base, set()).add(artifact.path)
                        break
                    if not self._wait(self._pause(attempt, failure.wait_s), until):
                        break
                else:
                    self._sound.add(base)
                    if tried:
                        _log.info("%s: fetched after %s", artifact.path, "; ".join(map(str, tried)))
                    return cubin
        raise self._error(artifact, tried, time.monotonic() - started)

    def _error(self, artifact: Artifact, tried: list[_Tried], seconds: float) -> FmhaError:
        attempts = [str(attempt) for attempt in tried]
        wrong = [attempt.failure.wrong for attempt in tried if attempt.failure.wrong]
        if wrong and len(wrong) == len(tried):
            return IntegrityError(
                f"every mirror serves wrong bytes: {wrong[0].message}",
                asked=wrong[0].asked,
                found="; ".join(attempts),
                fix="set FMHA_DISPATCH_MIRRORS to a mirror of this version",
            )
        return FetchError(
            f"{artifact.path} could not be fetched: {len(tried)} attempt(s) in {seconds:.1f} s",
            asked=artifact.path,
            found="; ".join(attempts),
            fix="set FMHA_DISPATCH_MIRRORS, or copy the file and set FMHA_DISPATCH_CUBIN_DIR",
            attempts=attempts,
        )

    def _verified(self, data: bytes, artifact: Artifact) -> VerifiedCubin:
        try:
            return verify(data, artifact)
        except IntegrityError as error:
            raise _Failure(f"wrong bytes: {error}", wrong=error) from None

    def _pause(self, attempt: int, asked_s: float | None) -> float:
        if asked_s is not None and asked_s > 0:
            return min(asked_s, self.limits.retry_after_s)
        return float(self.limits.backoff_s * 2**attempt * (0.5 + random.random()))

    def _wait(self, seconds: float, until: float) -> bool:
        """Sleeps; False if the deadline would pass meanwhile or the run was cancelled."""
        if time.monotonic() + seconds >= until:
            return False
        return not self._cancelled.wait(seconds)

    def _request(self, url: str, artifact: Artifact, hosts: frozenset[str], until: float) -> bytes:
        seconds = min(self.limits.try_s, until - time.monotonic())
        if seconds <= 0 or self._cancelled.is_set():
            raise _Failure("no time left")
        with self._deadline.within(seconds) as expired:
            try:
                return self._follow(url, artifact, hosts, seconds)
            except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                if expired():
                    raise _Failure(f"too slow: not done after {seconds:.0f} s") from None
                raise _failure_of(error) from None

    def _follow(self, url: str, artifact: Artifact, hosts: frozenset[str], seconds: float) -> bytes:
        timeout = (min(self.limits.connect_s, seconds), min(self.limits.read_s, seconds))
        for _ in range(self.limits.redirects + 1):
            response = self._session.get(
                url,
                stream=True,
                allow_redirects=False,
                timeout=timeout,
                # Encoded bytes could swell without bound; cubins travel as they are.
                headers={"Accept-Encoding": "identity"},
            )
            try:
                if response.status_code not in _REDIRECTS:
                    return self._body(response, artifact)
                url = _redirect(url, response.headers.get("Location", ""), hosts)
            finally:
                response.close()  # without reading the rest: it may be endless
        raise _Failure(f"more than {self.limits.redirects} redirects")

    def _body(self, response: requests.Response, artifact: Artifact) -> bytes:
        status = response.status_code
        if status != 200:
            reason = f"HTTP {status} {response.reason or ''}".rstrip()
            raise _Failure(reason, passing=status in _PASSING, wait_s=_retry_after(response))
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() not in ("identity", ""):
            raise _Failure(f"sent with Content-Encoding {encoding[:40]!r}, not asked for")
        length = response.headers.get("Content-Length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) != artifact.size:
            kind = response.headers.get("Content-Type", "no type")[:60]
            wrong = IntegrityError(
                f"{artifact.path}: wrong size", asked=f"{artifact.size} bytes", found=f"{length[:20]} bytes of {kind}"
            )
            raise _Failure(f"wrong bytes: {wrong}", wrong=wrong)
        body = bytearray()
        started = time.monotonic()
        while True:
            chunk = response.raw.read1(_CHUNK, decode_content=False)
            body += chunk
            if not chunk:
                break
            if len(body) > artifact.size:
                wrong = IntegrityError(f"{artifact.path}: wrong size", asked=f"{artifact.size} bytes", found="more")
                raise _Failure(f"wrong bytes: {wrong}", wrong=wrong)
            passed = time.monotonic() - started
            if passed > self.limits.min_rate_after_s and len(body) < passed * self.limits.min_bytes_per_s:
                raise _Failure(f"too slow: {len(body)} bytes in {passed:.0f} s")
        if len(body) < artifact.size:
            raise _Failure(f"truncated: {len(body)} of {artifact.size} bytes", passing=True)
        return bytes(body)


def _failure_of(error: Exception) -> _Failure:
    """A named reason for what requests and urllib3 raise; whether it may pass."""
    # requests wraps what urllib3 wraps: the innermost says what happened, without the URL.
    inner = error.args[0] if error.args else error
    text = redact_text(str(getattr(inner, "reason", inner)))[:300]
    if isinstance(error, requests.exceptions.SSLError):
        return _Failure(f"TLS: {text}", unreached=True)
    if isinstance(error, requests.exceptions.ProxyError):
        return _Failure(f"proxy: {text}", passing="407" not in text, unreached=True)
    if isinstance(error, (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError, TimeoutError)):
        return _Failure("timed out", passing=True, unreached=True)
    if isinstance(error, (urllib3.exceptions.IncompleteRead, urllib3.exceptions.ProtocolError)):
        return _Failure("truncated: the connection closed early", passing=True)
    if isinstance(error, (requests.exceptions.ConnectionError, OSError)):
        return _Failure(f"no connection: {text}", passing=True, unreached=True)
    return _Failure(f"unusable answer: {type(error).__name__}")


def _retry_after(response: requests.Response) -> float | None:
    """Seconds that the server asks to wait; None if it does not say, or says nothing sensible."""
    text = response.headers.get("Retry-After", "").strip()[:64]
    try:
        return float(int(text))
    except ValueError:
        pass
    try:
        return email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None


def _base(url: str, artifact: Artifact) -> str:
    """What `url` shares with those of the other artifacts of a family: mirrors on one host are still several."""
    return url.partition("?")[0].removesuffix(urllib.parse.quote(artifact.path.partition("/")[2]))


def _origin(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.netloc.rpartition("@")[2].lower()


def _redirect(url: str, location: str, hosts: frozenset[str]) -> str:
    """The URL that a redirect leads to, if it may be followed: to a known host, never from https to http."""
    target = urllib.parse.urljoin(url, location[:4096])
    scheme, host = _origin(target)
    # A relative target keeps the credentials that belong to its host; a server may hand out none.
    given = urllib.parse.urlsplit(location)
    if not location or scheme not in ("http", "https") or given.username is not None:
        raise _Failure(f"redirected to {redact(target)[:200]!r}, refused")
    if host not in hosts:
        raise _Failure(f"redirected to host {host[:200]!r}, which is no mirror, refused")
    if _origin(url)[0] == "https" and scheme == "http":
        raise _Failure("redirected from https to http, refused")
    return target


class _Deadline:
    """Cuts the sockets of a thread's request when its time is over.

    Timeouts of sockets start anew with each packet, so that a server may drip headers for hours within them.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: list[list[socket.socket]] = []

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[Any]:
        """Watches the sockets used in the block; yields a function that tells whether they were cut."""
        sockets: list[socket.socket] = []
        done = threading.Event()

        def expire() -> None:
            done.set()
            self._cut(sockets)

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        with self._lock:
            self._open.append(sockets)
        self._local.sockets = sockets
        timer.start()
        try:
            yield done.is_set
        finally:
            timer.cancel()
            self._local.sockets = None
            with self._lock:
                self._open = [other for other in self._open if other is not sockets]

    def watch(self, sock: Any) -> None:
        """Adds a socket to the block that this thread is in."""
        sockets = getattr(self._local, "sockets", None)
        if sockets is not None and isinstance(sock, socket.socket):
            sockets.append(sock)

    def cut(self) -> None:
        """Ends every block's sockets now."""
        with self._lock:
            blocks = list(self._open)
        for sockets in blocks:
            self._cut(sockets)

    @staticmethod
    def _cut(sockets: list[socket.socket]) -> None:
        for sock in sockets:
            with contextlib.suppress(OSError):
                # The plain method: SSLSocket's own would drop the TLS state under the reading thread.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> None:
        """None: `requests` would read a redirect's whole body to find the next hop."""
        return None


def _session(deadline: _Deadline, connections: int) -> requests.Session:
    class Connection(urllib3.connection.HTTPConnection):
        def getresponse(self) -> Any:
            deadline.watch(self.sock)
            return super().getresponse()

    class SecureConnection(urllib3.connection.HTTPSConnection):
        def getresponse(self) -> Any:
            deadline.watch(self.sock)
            return super().getresponse()

    class Pool(urllib3.connectionpool.HTTPConnectionPool):
        ConnectionCls = Connection

    class SecurePool(urllib3.connectionpool.HTTPSConnectionPool):
        ConnectionCls = SecureConnection

    class Adapter(requests.adapters.HTTPAdapter):
        def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
            super().init_poolmanager(*args, **kwargs)
            self.poolmanager.pool_classes_by_scheme = {"http": Pool, "https": SecurePool}

        def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
            manager = super().proxy_manager_for(*args, **kwargs)
            manager.pool_classes_by_scheme = {"http": Pool, "https": SecurePool}
            return manager

    session = _Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter(pool_connections=4, pool_maxsize=connections, max_retries=0))
    session.headers["User-Agent"] = "fmha-dispatch"
    return session
