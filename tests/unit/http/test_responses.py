"""Streams, tasks and disconnects: the guarantees for an application, over both protocols."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine

import httpx
import pytest
from tests.unit.servers.doubles import Wire, http, until

from penstock.http import Fault, HttpLimits, Listener, Request, Response
from penstock.http.connection import RequestTask

Answering = Callable[[Request], Coroutine[object, None, Response]]


class OneAnswer:
    """An application made of one function."""

    def __init__(self, answer: Answering) -> None:
        self.answer = answer
        self.faults: list[tuple[Fault, Request | None]] = []

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        return self.answer(request)

    def screen(self, request: Request) -> Response | None:
        return None

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        self.faults.append((fault, head))
        return Response(400, message.encode())


@contextlib.asynccontextmanager
async def serving(answer: Answering, limits: HttpLimits | None = None) -> AsyncIterator[tuple[Listener, str]]:
    listener = Listener(OneAnswer(answer), limits)
    host, port = await listener.bind("127.0.0.1", 0)
    try:
        yield listener, f"http://{host}:{port}"
    finally:
        await listener.drain(timeout_s=1)


@pytest.fixture(params=[False, True], ids=["h1", "h2"])
def http2(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Stream:
    """An iterator of pieces that the test releases."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent = 0
        self.is_closed = False

    async def __call__(self, request: Request) -> Response:
        return Response(200, content_type=b"text/event-stream", stream=self._run())

    async def _run(self) -> AsyncIterator[bytes]:
        try:
            while (piece := await self.pieces.get()) is not None:
                yield piece
                self.sent += 1
        finally:
            self.is_closed = True


async def test_a_stream_is_sent_piece_by_piece_and_the_connection_is_reused(http2: bool) -> None:
    stream = Stream()
    async with (
        serving(stream) as (_, url),
        http(http2=http2) as client,
    ):
        for _ in range(2):
            async with client.stream("GET", url) as response:
                pieces = response.aiter_raw()
                for piece in (b"one", b"two"):
                    stream.pieces.put_nowait(piece)
                    assert await anext(pieces) == piece
                stream.pieces.put_nowait(b"")
                stream.pieces.put_nowait(None)
                assert [piece async for piece in pieces] == []
            assert response.headers["content-type"] == "text/event-stream"
            assert stream.is_closed


async def test_a_stream_ends_when_its_client_leaves(http2: bool) -> None:
    stream = Stream()
    async with serving(stream) as (listener, url):
        async with (
            http(http2=http2) as client,
            client.stream("GET", url) as response,
        ):
            stream.pieces.put_nowait(b"one")
            assert await anext(response.aiter_raw()) == b"one"
        await until(lambda: stream.is_closed)
        await until(lambda: listener.connections == 0)


async def test_a_stream_waits_for_a_client_that_does_not_read(http2: bool) -> None:
    stream = Stream()
    async with (
        serving(stream) as (_, url),
        http(http2=http2) as client,
        client.stream("GET", url) as response,
    ):
        for _ in range(300):
            stream.pieces.put_nowait(b"x" * 100_000)
        stream.pieces.put_nowait(None)
        await asyncio.sleep(0.2)
        assert stream.sent < 250
        assert sum([len(piece) async for piece in response.aiter_raw()]) == 30_000_000


async def test_a_stream_to_an_old_client_ends_with_the_connection() -> None:
    stream = Stream()
    async with serving(stream) as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        wire = Wire(reader, writer)
        wire.send(b"GET / HTTP/1.0\r\n\r\n")
        stream.pieces.put_nowait(b"one")
        stream.pieces.put_nowait(None)
        head, body = (await wire.end()).split(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"one"
        await wire.close()


async def test_a_handler_gets_its_own_task_on_request(http2: bool) -> None:
    seen: list[bool] = []

    async def answer(request: Request) -> Response:
        seen.append(asyncio.current_task() is not None)
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await asyncio.sleep(0.001)
        seen.append(asyncio.current_task() is not None)
        return Response(200, [b"a", b"b"])

    async with (
        serving(answer) as (_, url),
        http(http2=http2) as client,
    ):
        assert (await client.get(url)).content == b"ab"
    assert seen == [False, True]


async def test_futures_are_waited_for_without_a_task() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    delivered: list[Response] = []

    async def answer() -> Response:
        await first
        with pytest.raises(ValueError, match="lost"):
            await second
        return Response(204)

    flight = RequestTask(delivered.append)
    flight.run(answer())
    assert not flight.is_patient
    first.set_result(None)
    await asyncio.sleep(0)
    second.set_exception(ValueError("lost"))
    await asyncio.sleep(0)
    assert [response.status for response in delivered] == [204]


async def test_many_requests_may_wait_for_one_future() -> None:
    shared = asyncio.get_running_loop().create_future()
    delivered: list[Response] = []

    async def answer() -> Response:
        await shared
        return Response(204)

    for _ in range(3):
        RequestTask(delivered.append).run(answer())
    shared.set_result(None)
    await asyncio.sleep(0)
    assert len(delivered) == 3


async def test_an_abandoned_request_runs_to_its_end_and_delivers_nothing() -> None:
    done: list[str] = []
    commit = asyncio.get_running_loop().create_future()

    async def answer() -> Response:
        await commit
        done.append("committed")
        return Response(200)

    flight = RequestTask(lambda response: done.append("delivered"))
    flight.run(answer())
    flight.abandon()
    commit.set_result(None)
    await asyncio.sleep(0)
    assert done == ["committed"]


async def test_draining_lets_requests_finish_and_closes_idle_connections() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def answer(request: Request) -> Response:
        if request.path == b"/slow":
            await gate
        return Response(200, b"done")

    async with serving(answer) as (listener, url), http() as slow, http() as idle:
        await idle.get(url)
        pending = asyncio.create_task(slow.get(f"{url}/slow"))
        await until(lambda: listener.connections == 2)
        await asyncio.sleep(0.02)
        draining = asyncio.create_task(listener.drain(timeout_s=10))
        await until(lambda: listener.connections == 1)
        gate.set_result(None)
        response = await pending
        assert (response.text, response.headers["connection"]) == ("done", "close")
        assert await draining
        with pytest.raises(httpx.ConnectError):
            await idle.get(url)


async def test_draining_aborts_requests_that_do_not_finish() -> None:
    async def answer(request: Request) -> Response:
        await asyncio.sleep(0)
        await asyncio.sleep(1000)
        return Response(200)

    async with serving(answer) as (listener, url), http() as client:
        pending = asyncio.create_task(client.get(url))
        await until(lambda: listener.connections == 1)
        await asyncio.sleep(0.02)
        assert not await listener.drain(timeout_s=0.05)
        with pytest.raises(httpx.RemoteProtocolError):
            await pending


async def test_a_client_that_vanished_without_closing_is_detected() -> None:
    """The kernel probes idle connections, and closes those that do not acknowledge."""

    async def answer(request: Request) -> Response:
        return Response(200, b"")

    async with serving(answer) as (listener, url):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        await until(lambda: listener.connections == 1)
        assert listener._host is not None
        (connection,) = listener._host.connections
        accepted = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if sys.platform == "linux":
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        writer.close()


@pytest.mark.parametrize("overloaded", [False, True], ids=["too large", "overloaded"])
@pytest.mark.parametrize("announced", [False, True], ids=["chunks", "length"])
async def test_the_head_of_a_request_is_available_to_its_error_response(
    http2: bool, announced: bool, overloaded: bool
) -> None:
    async def answer(request: Request) -> Response:
        raise AssertionError("it is never reached")

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * 1000

    app = OneAnswer(answer)
    held = {"body_bytes_max": 10**6, "held_bytes_max": 100} if overloaded else {"body_bytes_max": 2000}
    limits = HttpLimits(body_screened_bytes=50, **held)
    listener = Listener(app, limits)
    host, port = await listener.bind("127.0.0.1", 0)
    async with http(http2=http2) as client:
        response = await client.post(
            f"http://{host}:{port}/path?a=1",
            content=b"x" * 4000 if announced else pieces(),
            headers={"content-type": "application/json"},
        )
    assert response.status_code == 400
    ((fault, head),) = app.faults
    assert fault is (Fault.OVERLOADED if overloaded else Fault.TOO_LARGE)
    assert head is not None
    assert (head.method, head.path, head.query_text) == (b"POST", b"/path", b"a=1")
    assert head.headers[b"content-type"] == b"application/json"
    await listener.drain(timeout_s=1)
