"""Known heads give the same request as the parser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import SYSTEM_CLOCK
from penstock.http.connection import Host
from penstock.http.h1 import H1Connection
from penstock.http.h1_heads import KnownHeads
from penstock.http.limits import HttpLimits
from penstock.http.message import Fault, Request, Response

PLAIN = b"POST /a?b=c HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
PIECES = [
    PLAIN % (3, b"abc"),
    PLAIN % (3, b"xyz"),
    PLAIN % (4, b"\r\n\r\n"),
    PLAIN % (0, b""),
    b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /b HTTP/1.0\r\nhost: x\r\n\r\n",
    b"GET /b HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: other\r\n\r\n",
    b"POST /c HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    b"POST /d HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nhi",
    b"POST /e HTTP/1.1\r\ncontent-length: 40\r\n\r\n" + b"0123456789" * 4,
    b"\r\n",
    b"POST /a?b=c HTTP/1.1\r\n",
    b"nonsense\r\n\r\n",
]


class Wire:
    """A transport that records what is written."""

    def __init__(self, protocol: H1Connection) -> None:
        self.protocol = protocol
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def get_protocol(self) -> H1Connection:
        return self.protocol

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Collector:
    """An application that answers immediately and records its requests."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        parts = (request.method, request.path, request.query_text, dict(request.headers), request.body)
        self.seen.append(parts)
        deliver(Response(200, request.body))
        return None

    def screen(self, request: Request) -> Response | None:
        return None

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        return Response(400, message.encode())


class Forgetful(KnownHeads):
    def learn(self, data: bytes, request: Request, target: bytes) -> None: ...


def host_with(heads: KnownHeads) -> tuple[Host, Collector]:
    app = Collector()
    limits = HttpLimits(body_screened_bytes=32)
    host = Host(app, limits, SYSTEM_CLOCK, asyncio.get_running_loop())
    host.heads = heads
    host.date = b"today"
    return host, app


async def told(host: Host, pieces: Sequence[bytes]) -> list[bytes]:
    """Return the responses of one connection to these reads."""
    connection = H1Connection(host)
    wire = Wire(connection)
    connection.connection_made(cast(asyncio.Transport, wire))
    for piece in pieces:
        if wire.closed:
            break
        connection.data_received(piece)
        for _ in range(5):
            await asyncio.sleep(0)  # pipelined requests are answered a turn later each
    return wire.written


reads = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=3).map(b"".join), max_size=6)


@settings(max_examples=300)
@given(st.lists(reads, min_size=1, max_size=3), st.data())
def test_known_heads_change_neither_requests_nor_responses(
    connections: list[list[bytes]], data: st.DataObject
) -> None:
    cuts = [[data.draw(st.integers(0, len(piece))) for piece in pieces] for pieces in connections]

    async def run() -> None:
        knowing, asked = host_with(KnownHeads())
        parsing, parsed = host_with(Forgetful())
        for pieces, places in zip(connections, cuts, strict=True):
            split = [
                part
                for piece, at in zip(pieces, places, strict=True)
                for part in (piece[:at], piece[at:])
                if part
            ]
            for sent in (pieces, pieces, split):
                assert await told(knowing, sent) == await told(parsing, sent)
        assert asked.seen == parsed.seen
        assert knowing.budget.held == parsing.budget.held

    asyncio.run(run())


async def test_a_known_head_is_not_parsed_again() -> None:
    host, app = host_with(KnownHeads())
    first, second = PLAIN % (3, b"abc"), PLAIN % (3, b"xyz")
    await told(host, [first])
    assert len(host.heads) == 1
    connection = H1Connection(host)
    connection._parser = None  # type: ignore[assignment]
    connection.connection_made(cast(asyncio.Transport, Wire(connection)))
    connection.data_received(second)
    assert [parts[-1] for parts in app.seen] == [b"abc", b"xyz"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        PIECES[4].replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        PIECES[6],
        PIECES[8],
        PIECES[9],
        PIECES[10],
        PLAIN % (3, b"abc") * 2,
        PLAIN % (3, b"abc") + b"\r\n",
        b"POST /a HTTP/1.1\r\nx: %b\r\ncontent-length: 0\r\n\r\n" % (b"y" * 4096),
    ],
)
async def test_a_head_that_depends_on_the_parser_is_not_cached(request_bytes: bytes) -> None:
    host, _ = host_with(KnownHeads())
    await told(host, [request_bytes])
    assert len(host.heads) == 0


async def test_the_cache_of_heads_is_bounded() -> None:
    host, app = host_with(KnownHeads())
    for number in range(2500):
        await told(host, [b"GET /%d HTTP/1.1\r\n\r\n" % number])
    assert 0 < len(host.heads) <= 1024
    assert len(app.seen) == 2500
