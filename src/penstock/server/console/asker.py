"""Questions that are asked again and again, over connections that stay open.

A look every two seconds is worth little if each costs milliseconds of a core that ingest needs. A client for
all of HTTP takes one to two for a question, this one a tenth of that. It knows what parts of a fleet answer
with: a status, a length, a body.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from penstock.errors import LimitExceeded, Unavailable

__all__ = ["Answer", "Asker"]

ANSWER_BYTES_MAX: Final = 16 << 20
_IDLE_MAX: Final = 8
_HEAD_END: Final = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and what came with it."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class _Line:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(frozen=True, slots=True)
class _Head:
    """What the head of an answer says of its body."""

    status: int
    size: int
    is_last: bool
    """The server closes the connection behind it."""


class Asker:
    """Questions to one server. Any number at a time; each has a connection to itself while it lasts.

    Only for what changes nothing: a question may be sent twice.
    """

    def __init__(self, name: str, url: str, key: str | None, *, timeout_s: float) -> None:
        """`name` is what errors call the server. Its address is `http://host[:port][/path]`."""
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._name = name
        self._is_plain = parts.scheme == "http"
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._root = parts.path.rstrip("/")
        self._headers = f"Host: {parts.netloc}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
        self._timeout_s = timeout_s
        self._idle: list[_Line] = []
        self._is_closed = False

    async def ask(self, path: str, body: bytes | None = None, *, accept: str = "application/json") -> Answer:
        """What the server says, whatever it is, to a GET, or to a POST of JSON.

        Raises `Unavailable`, `LimitExceeded`, `TimeoutError`.
        """
        question = self._question(path, body, accept)
        async with asyncio.timeout(self._timeout_s):
            try:
                return await self._answer(question)
            except (OSError, EOFError) as error:
                if isinstance(error, TimeoutError):
                    raise
                why = str(error) or type(error).__name__
                raise Unavailable(f"{self._name} cannot be reached: {why}") from error

    def close(self) -> None:
        """Close what is idle now, and every other connection when its answer is there."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().writer.close()

    def _question(self, path: str, body: bytes | None, accept: str) -> bytes:
        method = "GET" if body is None else "POST"
        sent = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}Accept: {accept}\r\n{sent}\r\n"
        return head.encode() + (body or b"")

    async def _answer(self, question: bytes) -> Answer:
        while self._idle:
            try:
                return await self._over(self._idle.pop(), question)
            except (ConnectionError, EOFError):  # closed while it was idle: asked again over another one
                continue
        return await self._over(await self._dial(), question)

    async def _dial(self) -> _Line:
        if not self._is_plain:
            raise Unavailable(f"{self._name} has no address that begins with http://")
        return _Line(*await asyncio.open_connection(self._host, self._port))

    async def _over(self, line: _Line, question: bytes) -> Answer:
        is_kept = False
        try:
            line.writer.write(question)
            head = self._parsed(await line.reader.readuntil(_HEAD_END))
            answer = Answer(head.status, await line.reader.readexactly(head.size))
            is_kept = not (head.is_last or self._is_closed or len(self._idle) >= _IDLE_MAX)
        except asyncio.LimitOverrunError as error:
            raise Unavailable(f"{self._name} answers with a head that does not end") from error
        finally:
            if is_kept:
                self._idle.append(line)
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
            or not (words[1] + size).isdigit()
            or not size
        ):
            raise Unavailable(f"{self._name} does not answer as a part of a fleet does; check its address")
        if int(size) > ANSWER_BYTES_MAX:
            raise LimitExceeded(f"the answer of {self._name} is above {ANSWER_BYTES_MAX >> 20} MiB")
        return _Head(int(words[1]), int(size), fields.get(b"connection", b"").lower() == b"close")
