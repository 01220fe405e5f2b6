"""Streaming responses: the guarantees for a streaming body, over both protocols."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.http.test_responses import serving
from tests.unit.servers.doubles import Wire, http, until

from penstock.http import HttpLimits, Listener, Request, Response, StreamWriter, UpgradeWriter

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(params=[False, True], ids=["h1", "h2"])
def http2(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Speaker:
    """A streaming body that records its notifications."""

    def __init__(self) -> None:
        self.writer: StreamWriter | None = None
        self.is_closed = False
        self.resumed = 0
        self.requests = 0

    async def __call__(self, request: Request) -> Response:
        self.requests += 1
        return Response(200, content_type=b"text/event-stream", live=self)

    def attach(self, writer: StreamWriter) -> None:
        self.writer = writer
        writer.write(b"hello")

    def writable(self) -> None:
        self.resumed += 1

    def closed(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def fill(self, most: int = 3000) -> int:
        """Write until the client is behind. Return the number of pieces."""
        assert self.writer is not None
        pieces = 0
        while self.writer.is_writable and pieces < most:
            self.writer.write(b"x" * 10_000)
            pieces += 1
        return pieces


class Echo(Speaker):
    """An upgrade that echoes its input."""

    async def __call__(self, request: Request) -> Response:
        self.requests += 1
        return Response(101, headers=[(b"upgrade", b"echo"), (b"connection", b"Upgrade")], upgrade=self)

    def connect(self, writer: UpgradeWriter) -> None:
        self.upgrade = writer
        self.attach(writer)

    def received(self, data: bytes) -> None:
        assert self.writer is not None
        self.writer.write(data)


def held_bytes(listener: Listener) -> int:
    assert listener._host is not None
    return listener._host.budget.held


async def wire_to(url: str) -> Wire:
    return Wire(*await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1])))


async def test_pieces_arrive_as_they_are_written_and_the_end_ends_the_response(http2: bool) -> None:
    speaker = Speaker()
    async with (
        serving(speaker) as (_, url),
        http(http2=http2) as client,
        client.stream("GET", url) as response,
    ):
        assert response.headers["content-type"] == "text/event-stream"
        assert "content-length" not in response.headers
        pieces = response.aiter_raw()
        assert await anext(pieces) == b"hello"
        assert speaker.writer is not None
        speaker.writer.write(b"one")
        assert await anext(pieces) == b"one"
        speaker.writer.write(b"two")
        speaker.writer.end()
        assert b"".join([piece async for piece in pieces]) == b"two"
        assert not speaker.is_closed  # it knows: it was the one who ended it
        speaker.writer.write(b"nobody hears this")
        assert not speaker.writer.is_writable


async def test_a_streaming_body_is_notified_once_when_its_client_leaves(http2: bool) -> None:
    speaker = Speaker()
    async with serving(speaker) as (listener, url):
        async with http(http2=http2) as client, client.stream("GET", url) as response:
            assert await anext(response.aiter_raw()) == b"hello"
        await until(lambda: speaker.is_closed)
        await until(lambda: listener.connections == 0)
        assert speaker.writer is not None
        assert not speaker.writer.is_writable
        speaker.writer.write(b"nobody")
        speaker.writer.end()


async def test_a_slow_client_is_detected_and_loses_nothing(http2: bool) -> None:
    speaker = Speaker()
    async with (
        serving(speaker) as (listener, url),
        http(http2=http2) as client,
        client.stream("GET", url) as response,
    ):
        pieces = response.aiter_raw()
        assert await anext(pieces) == b"hello"
        total = 0
        for _ in range(50):  # the first buffers take a while to fill
            total += speaker.fill()
            await asyncio.sleep(0.001)
        assert speaker.writer is not None
        assert not speaker.writer.is_writable
        assert total < 3000
        assert held_bytes(listener) >= 0
        resumed, read = speaker.resumed, 0
        while read < total * 10_000:
            read += len(await anext(pieces))
        await until(lambda: speaker.resumed > resumed)
        assert speaker.writer.is_writable
        assert held_bytes(listener) < 8192  # an open stream of HTTP/2 counts, its bytes do not
        speaker.writer.end()


async def test_a_client_that_reads_nothing_is_disconnected_and_its_bytes_released() -> None:
    speaker = Speaker()
    async with serving(speaker, HttpLimits(write_timeout_s=3)) as (listener, url):
        wire = await wire_to(url)
        wire.send(GET)
        await until(lambda: speaker.writer is not None)
        for _ in range(50):
            speaker.fill()
            await asyncio.sleep(0.001)
        assert held_bytes(listener) > 0
        for _ in range(4):
            listener.tick()
        await until(lambda: speaker.is_closed)
        assert held_bytes(listener) == 0
        await wire.close()


async def test_requests_after_a_live_request_are_never_answered() -> None:
    speaker = Speaker()
    async with serving(speaker) as (listener, url):
        wire = await wire_to(url)
        body = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"y" * 100_000
        wire.send(GET + GET * 50 + body)
        await until(lambda: speaker.writer is not None)
        wire.send(GET + body)
        await asyncio.sleep(0.05)
        assert speaker.requests == 1
        assert speaker.writer is not None
        speaker.writer.end()
        text = await wire.end()
        assert text.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in text
        assert text.endswith(b"5\r\nhello\r\n0\r\n\r\n")
        await wire.close()
        await until(lambda: listener.connections == 0)
        assert held_bytes(listener) == 0


async def test_a_client_without_chunk_support_gets_plain_bytes_until_the_end() -> None:
    speaker = Speaker()
    async with serving(speaker) as (_, url):
        wire = await wire_to(url)
        wire.send(b"GET / HTTP/1.0\r\n\r\n")
        await until(lambda: speaker.writer is not None)
        assert speaker.writer is not None
        speaker.writer.end()
        head, body = (await wire.end()).split(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"hello"
        await wire.close()


async def test_a_live_client_that_stops_sending_has_left() -> None:
    speaker = Speaker()
    async with serving(speaker) as (_, url):
        wire = await wire_to(url)
        wire.send(GET)
        await until(lambda: speaker.writer is not None)
        wire.writer.write_eof()
        await until(lambda: speaker.is_closed)
        await wire.close()


async def test_a_streaming_body_may_disconnect_the_client(http2: bool) -> None:
    speaker = Speaker()
    async with (
        serving(speaker) as (_, url),
        http(http2=http2) as client,
        client.stream("GET", url) as response,
    ):
        assert await anext(response.aiter_raw()) == b"hello"
        assert speaker.writer is not None
        speaker.writer.cut()
        await until(lambda: speaker.is_closed)


async def test_other_requests_continue_next_to_a_live_http2_stream() -> None:
    speaker = Speaker()

    async def answer(request: Request) -> Response:
        return await speaker(request) if request.path == b"/live" else Response(200, b"plain")

    async with (
        serving(answer) as (_, url),
        http(http2=True) as client,
        client.stream("GET", f"{url}/live") as response,
    ):
        assert await anext(response.aiter_raw()) == b"hello"
        assert (await client.get(url)).text == "plain"
        speaker.fill()
        assert speaker.writer is not None
        assert not speaker.writer.is_writable
        assert (await client.get(url)).text == "plain"


# ---- upgrades ---------------------------------------------------------------------------------------------

UPGRADE = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n"


async def test_an_upgrade_owns_the_connection_from_the_first_byte() -> None:
    echo = Echo()
    async with serving(echo) as (_, url):
        wire = await wire_to(url)
        wire.send(UPGRADE + b"first")
        head = await asyncio.wait_for(wire.reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        assert await asyncio.wait_for(wire.reader.readexactly(10), 5) == b"hellofirst"
        wire.send(b"GET / HTTP/1.1\r\n\r\n")
        assert await asyncio.wait_for(wire.reader.readexactly(18), 5) == b"GET / HTTP/1.1\r\n\r\n"
        assert echo.requests == 1
        await wire.close()
        await until(lambda: echo.is_closed)


async def test_a_request_keeps_its_upgrade_headers_if_the_upgrade_is_not_granted() -> None:
    seen: list[bytes | None] = []

    async def answer(request: Request) -> Response:
        seen.append(request.headers.get(b"upgrade"))
        return Response(200, b"no")

    async with serving(answer) as (_, url):
        wire = await wire_to(url)
        wire.send(UPGRADE + GET)
        assert (await wire.answer()).body == (await wire.answer()).body == b"no"
        assert seen == [b"echo", None]
        await wire.close()


async def test_an_upgrade_counts_held_bytes_and_releases_them() -> None:
    echo = Echo()
    async with serving(echo, HttpLimits(held_bytes_max=1000)) as (listener, url):
        wire = await wire_to(url)
        wire.send(UPGRADE)
        await until(lambda: echo.writer is not None)
        assert echo.upgrade.hold(900)
        assert echo.upgrade.hold(1000)
        assert not echo.upgrade.hold(1001)
        assert held_bytes(listener) == 1000
        assert echo.upgrade.hold(10)
        await wire.close()
        await until(lambda: echo.is_closed)
        assert held_bytes(listener) == 0


async def test_a_paused_upgrade_receives_nothing_until_it_resumes() -> None:
    echo = Echo()
    async with serving(echo) as (_, url):
        wire = await wire_to(url)
        wire.send(UPGRADE)
        await until(lambda: echo.writer is not None)
        echo.upgrade.pause()
        wire.send(b"quiet")
        await asyncio.sleep(0.05)
        heard: list[bytes] = []
        echo.received = heard.append  # type: ignore[method-assign]
        assert heard == []
        echo.upgrade.resume()
        await until(lambda: heard == [b"quiet"])
        await wire.close()
