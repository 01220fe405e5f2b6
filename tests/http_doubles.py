"""Small HTTP servers that misbehave on purpose."""

from __future__ import annotations

import contextlib
import enum
import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Mood(enum.Enum):
    """What the proxy does with a write."""

    HONEST = "pass it on and return the reply"
    LOSE_REPLY = "pass it on, then close the connection without a reply"
    LOSE_REQUEST = "close the connection at once"
    FAIL_AFTER = "pass it on, then answer 500"
    SLOW_DOWN = "answer 503 at once"
    STALL = "pass it on and keep silent"


class Proxy:
    """Stands before a real server and spoils writes according to its mood; reads always pass."""

    def __init__(self, upstream: str) -> None:
        self.upstream = urlsplit(upstream)
        self.mood = Mood.HONEST
        self.writes = 0
        self.endpoint = ""
        self.released = threading.Event()

    def forward(self, handler: BaseHTTPRequestHandler) -> tuple[int, list[tuple[str, str]], bytes]:
        size = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(size) if size else None
        connection = http.client.HTTPConnection(self.upstream.hostname or "", self.upstream.port, timeout=30)
        try:
            connection.request(handler.command, handler.path, body, dict(handler.headers.items()))
            reply = connection.getresponse()
            return reply.status, reply.getheaders(), reply.read()
        finally:
            connection.close()


@contextlib.contextmanager
def proxy(upstream: str) -> Iterator[Proxy]:
    """A proxy on a port of its own."""
    state = Proxy(upstream)

    class Handler(_Quiet):
        def handle_any(self) -> None:
            mood = state.mood if self.command in ("PUT", "POST", "DELETE") else Mood.HONEST
            if self.command == "PUT":
                state.writes += 1
            if mood is Mood.LOSE_REQUEST:
                self.close_connection = True
                return
            if mood is Mood.SLOW_DOWN:
                self.reply(503, [], b"<Error><Code>SlowDown</Code></Error>")
                return
            status, headers, body = state.forward(self)
            if mood is Mood.LOSE_REPLY:
                self.close_connection = True
            elif mood is Mood.FAIL_AFTER:
                self.reply(500, [], b"<Error><Code>InternalError</Code></Error>")
            elif mood is Mood.STALL:
                state.released.wait(30)
                self.close_connection = True
            else:
                self.reply(status, headers, body)

    with _serving(Handler) as endpoint:
        state.endpoint = endpoint
        try:
            yield state
        finally:
            state.released.set()


@contextlib.contextmanager
def careless_server(ignored: str) -> Iterator[str]:
    """Speaks enough S3 to store objects, but does not look at the header `ignored`. Its endpoint."""
    objects: dict[str, tuple[bytes, str]] = {}
    mutex = threading.Lock()

    class Handler(_Quiet):
        def handle_any(self) -> None:
            with mutex:
                self.serve_object(self.path.partition("?")[0])

        def serve_object(self, path: str) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size) if size else b""
            current = objects.get(path)
            if self.command == "PUT":
                if self.refuses(current):
                    self.reply(412, [], b"<Error><Code>PreconditionFailed</Code></Error>")
                    return
                etag = f'"{time.monotonic_ns()}"'
                objects[path] = (body, etag)
                self.reply(200, [("ETag", etag)], b"")
            elif self.command == "POST":
                objects.clear()
                self.reply(200, [], b"<DeleteResult></DeleteResult>")
            elif current is None:
                self.reply(404, [], b"<Error><Code>NoSuchKey</Code></Error>")
            else:
                modified = ("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
                self.reply(200, [("ETag", current[1]), modified], current[0])

        def refuses(self, current: tuple[bytes, str] | None) -> bool:
            if self.headers.get("If-None-Match") and ignored != "If-None-Match":
                return current is not None
            wanted = self.headers.get("If-Match")
            if wanted and ignored != "If-Match":
                return current is None or current[1] != wanted
            return False

    with _serving(Handler) as endpoint:
        yield endpoint


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        raise NotImplementedError

    def do_GET(self) -> None:
        self.handle_any()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        length = next((value for name, value in headers if name.lower() == "content-length"), str(len(body)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean."""


@contextlib.contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
