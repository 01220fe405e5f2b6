"""Polls parts over HTTP on persistent connections, and reads their `/metrics`.

Polls must not take CPU time from ingest. A general HTTP client needs one to two milliseconds of CPU time for
a request. This one needs a tenth of that, but supports only the responses of parts: a status, a length and a
body.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, SupportsIndex
from urllib.parse import urlsplit

import httpx

from penstock.errors import LimitExceeded, PermissionDenied, Unavailable

ANSWER_BYTES_MAX: Final = 16 << 20
_IDLE_MAX: Final = 8
_IDLE_S: Final = 30.0
"""Longer than the interval between two polls, and short enough that idle connections do no harm."""
_STATUS_DIGITS: Final = 3
_SIZE_DIGITS_MAX: Final = 18
_HEAD_END: Final = b"\r\n\r\n"
_TIMEOUT_S: Final = 2.5
"""Shorter than the time limit of a poller, so that the error names the server."""
_REST: Final = re.compile(r'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})?[ \t]+(\S+)')
"""The rest of a line after the name: labels and a value. Time and exemplar (` # `) are ignored."""
_ESCAPED: Final = re.compile(r"\\(.)")
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and the body of a response."""

    status: int
    body: bytes


class _Reader(asyncio.StreamReader):
    """Counts received bytes, to detect unsolicited data."""

    received_bytes = 0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        piece = bytes(data)
        self.received_bytes += len(piece)
        super().feed_data(piece)


@dataclass(slots=True)
class _Line:
    """One connection."""

    reader: _Reader
    writer: asyncio.StreamWriter
    read_bytes: int = 0

    @property
    def is_quiet(self) -> bool:
        """Whether the connection seems open and has no unread data, which could not be the next response."""
        return self.reader.received_bytes == self.read_bytes and not self.reader.at_eof()


@dataclass(frozen=True, slots=True)
class _Head:
    """The status of a response, and the size of its body."""

    status: int
    size: int
    is_last: bool
    """Whether the server closes the connection after this response."""


class HttpPoller:
    """A client of one server. Concurrent requests use separate connections.

    It is only for idempotent requests, because a request may be sent twice.
    """

    def __init__(
        self, name: str, url: str, key: str | None, *, timeout_s: float, idle_s: float = _IDLE_S
    ) -> None:
        """Create the client. `name` is the server's name in errors. `url` is `http://host[:port][/path]`.

        Connections are closed after `idle_s` without a request.
        """
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._name = name
        self._is_plain = parts.scheme == "http"
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._root = parts.path.rstrip("/")
        self._headers = f"Host: {parts.netloc}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._idle: list[_Line] = []
        self._resting: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def ask(self, path: str, body: bytes | None = None, *, accept: str = "application/json") -> Answer:
        """Send a GET, or a POST of JSON, and return the response with any status.

        Raise `Unavailable` or `LimitExceeded`.
        """
        request = self._request(path, body, accept)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._answer(request)
        except TimeoutError as error:
            raise Unavailable(f"{self._name} did not respond in time") from error
        except (OSError, EOFError) as error:
            why = str(error) or type(error).__name__
            raise Unavailable(f"{self._name} cannot be reached: {why}") from error

    def close(self) -> None:
        """Close idle connections now, and the others after their responses."""
        self._is_closed = True
        self._rest()

    def _rest(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        while self._idle:
            self._idle.pop().writer.close()

    def _keep(self, line: _Line) -> None:
        """Keep a connection for the next request."""
        self._idle.append(line)
        if self._resting is not None:
            self._resting.cancel()
        self._resting = asyncio.get_running_loop().call_later(self._idle_s, self._rest)

    def _request(self, path: str, body: bytes | None, accept: str) -> bytes:
        method = "GET" if body is None else "POST"
        sent = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}Accept: {accept}\r\n{sent}\r\n"
        return head.encode() + (body or b"")

    async def _answer(self, request: bytes) -> Answer:
        while self._idle:
            line = self._idle.pop()
            if not line.is_quiet:
                line.writer.close()
                continue
            try:
                return await self._over(line, request)
            except (ConnectionError, EOFError):  # closed while it was idle: retry on another one
                continue
        return await self._over(await self._dial(), request)

    async def _dial(self) -> _Line:
        if not self._is_plain:
            raise Unavailable(f"{self._name} has no address that begins with http://")
        loop = asyncio.get_running_loop()
        reader = _Reader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.create_connection(lambda: protocol, self._host, self._port)
        return _Line(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def _over(self, line: _Line, request: bytes) -> Answer:
        is_kept = False
        try:
            line.writer.write(request)
            text = await line.reader.readuntil(_HEAD_END)
            head = self._parsed(text)
            answer = Answer(head.status, await line.reader.readexactly(head.size))
            line.read_bytes += len(text) + head.size
            is_wanted = not (head.is_last or self._is_closed) and len(self._idle) < _IDLE_MAX
            is_kept = is_wanted and line.is_quiet
        except asyncio.LimitOverrunError as error:
            raise Unavailable(f"{self._name} sent a response with an unterminated head") from error
        finally:
            if is_kept:
                self._keep(line)
            else:
                line.writer.close()
        return answer

    def _parsed(self, head: bytes) -> _Head:
        first, *lines = head[: -len(_HEAD_END)].split(b"\r\n")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(b":") for x in lines)
        }
        words = first.split(None, 2)
        size = fields.get(b"content-length", b"")
        if (
            len(words) < 2
            or not words[0].startswith(b"HTTP/1.")
            or not (words[1].isdigit() and len(words[1]) == _STATUS_DIGITS)
            or not (size.isdigit() and len(size) <= _SIZE_DIGITS_MAX)
            or b"transfer-encoding" in fields
        ):
            raise Unavailable(f"{self._name} does not respond like a part of a fleet; check its address")
        if int(size) > ANSWER_BYTES_MAX:
            raise LimitExceeded(f"the response of {self._name} is above {ANSWER_BYTES_MAX >> 20} MiB")
        return _Head(int(words[1]), int(size), fields.get(b"connection", b"").lower() == b"close")


class HttpSource:
    """A part whose address may change when it is restarted."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._url: str | None = None
        self._key: str | None = None
        self._poller: HttpPoller | None = None
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False)

    def move(self, url: str | None, key: str | None) -> None:
        """Set the part's address."""
        if (url, key) == (self._url, self._key):
            return
        self._url, self._key = url, key
        if self._poller is not None:
            self._poller.close()
        self._poller = None if url is None else HttpPoller(self._name, url, key, timeout_s=_TIMEOUT_S)

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.close()
        await self._http.aclose()

    async def look(self) -> Exposition:
        """Return the part's `/metrics`. Raise `Unavailable`, `PermissionDenied` or `LimitExceeded`."""
        if self._poller is None:
            raise self._absent
        answer = await self._poller.ask("/metrics", accept="text/plain")
        text = answer.body.decode("utf-8", "replace")
        self._check(answer.status, text)
        return Exposition(text)

    async def pass_on(
        self, path: str, *, body: bytes, kind: str, timeout_s: float
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """Return the part's response to a POST, with any status. Raise `Unavailable` or `LimitExceeded`."""
        allowed = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        headers = {**allowed, "Content-Type": kind, "Accept": "application/json"}
        async with self._http.stream(
            "POST", f"{self._address}{path}", content=body, headers=headers, timeout=timeout_s
        ) as answer:
            pieces, size = [], 0
            async for piece in answer.aiter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size > ANSWER_BYTES_MAX:
                    raise LimitExceeded(
                        f"the response of {self._name} is above {ANSWER_BYTES_MAX >> 20} MiB; request less"
                    )
        return answer.status_code, b"".join(pieces), answer.headers

    @property
    def _address(self) -> str:
        if self._url is None:
            raise self._absent
        return self._url.rstrip("/")

    @property
    def _absent(self) -> Unavailable:
        return Unavailable(f"{self._name} is not running, or has no address yet")

    def _check(self, status: int, text: str) -> None:
        if status in (401, 403):
            raise PermissionDenied(f"{self._name} rejects the console's key ({status})")
        if status != 200:
            raise Unavailable(f"{self._name} responds with {status}: {text.strip()[:200]}")


class Exposition:
    """The samples of one scrape, except those that do not parse or are not finite.

    Only a few of a part's hundreds of samples are shown, so a line is parsed on request.
    """

    def __init__(self, text: str) -> None:
        self._text = f"\n{text}"
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}

    def _of(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        if name not in self._samples:
            self._samples[name] = list(self._read(name))
        return self._samples[name]

    def _read(self, name: str) -> Iterator[tuple[Mapping[str, str], float]]:
        start = f"\n{name}"
        at = self._text.find(start)
        while at >= 0:
            found = _REST.match(self._text, at + len(start))
            value = math.nan if found is None else _number(found[2])
            if found is not None and math.isfinite(value):
                yield _labels(found[1]) if found[1] else {}, value
            at = self._text.find(start, at + 1)

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of a metric's samples with these labels, or None if there are none."""
        values = [
            value
            for found, value in self._of(name)
            if all(found.get(key) == text for key, text in labels.items())
        ]
        return sum(values) if values else None

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a metric by one of its labels."""
        totals: dict[str, float] = {}
        for labels, value in self._of(name):
            key = labels.get(label, "")
            totals[key] = totals.get(key, 0.0) + value
        return totals


def _labels(text: str) -> dict[str, str]:
    return {name: _ESCAPED.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
