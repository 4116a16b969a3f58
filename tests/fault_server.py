"""A local HTTP server that misbehaves on order and counts what it is asked."""

from __future__ import annotations

import collections
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Handler = http.server.BaseHTTPRequestHandler
Answer = Callable[[Handler], None]


class FaultServer:
    """Serves `files` by path, over TLS with a `certificate`.

    An entry of `scripts` answers first, one step a request, the last step for ever; then `default`, then the files.

    Attributes:
        hits: requests by path.
        sockets: connections accepted.
        headers: of the last request.
    """

    def __init__(self, files: dict[str, bytes], certificate: Path | None = None) -> None:
        self.files = dict(files)
        self.scripts: dict[str, list[Answer]] = {}
        self.default: Answer | None = None
        self.hits: collections.Counter[str] = collections.Counter()
        self.sockets = 0
        self.headers: dict[str, str] = {}
        self._lock = threading.Lock()
        outer = self

        class Requests(Handler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                with outer._lock:
                    outer.sockets += 1

            def do_GET(self) -> None:
                path = self.path.partition("?")[0].lstrip("/")
                with outer._lock:
                    outer.hits[path] += 1
                    outer.headers = dict(self.headers)
                    script = outer.scripts.get(path)
                    answer = (script.pop(0) if len(script) > 1 else script[0]) if script else outer.default
                if answer is not None:
                    answer(self)
                elif path in outer.files:
                    reply(200, outer.files[path])(self)
                else:
                    reply(404, b"no such file")(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients that hang up are what the tests are about

        self._server = Server(("127.0.0.1", 0), Requests)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # The handshake belongs to the connection's thread, not to the one that accepts.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self.url = f"https://{self.host}"

    @contextmanager
    def running(self) -> Iterator[FaultServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()


def reply(status: int, body: bytes = b"", *, length: int | None = None, **headers: str) -> Answer:
    """A whole answer; `length` instead of the true Content-Length; header names with _ for -."""

    def answer(handler: Handler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)
        if length is not None:
            handler.close_connection = True

    return answer


def drip(head: bytes, interval_s: float, seconds: float) -> Answer:
    """Sends `head`, then a byte each interval, for at most `seconds`."""

    def answer(handler: Handler) -> None:
        handler.close_connection = True
        handler.wfile.write(head)
        ended = threading.Event()
        for _ in range(int(seconds / interval_s)):
            handler.wfile.write(b"x")
            ended.wait(interval_s)

    return answer


def reset(after: bytes = b"") -> Answer:
    """Sends `after` and closes the connection."""

    def answer(handler: Handler) -> None:
        handler.close_connection = True
        handler.wfile.write(after)

    return answer
