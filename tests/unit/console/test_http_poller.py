"""Requests share a connection that stays open, and the caller never sees its failures."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from penstock.console.http_poller import Answer, HttpPoller
from penstock.errors import LimitExceeded, Unavailable


class Part:
    """A server that sends the responses of a test and records the requests."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.connections = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.say: Callable[[int], bytes] = lambda count: answer(b"%d" % count)
        self.held = asyncio.Event()
        self.held.set()
        self.asked = asyncio.Semaphore(0)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                if b"Content-Length: 2" in self.heads[-1]:
                    self.heads[-1] += await reader.readexactly(2)
                said = self.say(len(self.heads))
                self.asked.release()
                await self.held.wait()
                writer.write(said)
        writer.close()


def answer(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n%b\r\n%b" % (status, len(body), more, body)


@contextlib.asynccontextmanager
async def asking(
    part: Part, timeout_s: float = 5.0, path: str = "", idle_s: float = 30.0
) -> AsyncIterator[HttpPoller]:
    async with await asyncio.start_server(part.talk, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}{path}"
        poller = HttpPoller("the part", url, "secret", timeout_s=timeout_s, idle_s=idle_s)
        try:
            yield poller
        finally:
            poller.close()
            part.held.set()
            for writer in part.writers:
                writer.close()


async def test_sequential_requests_share_one_connection() -> None:
    part = Part()
    async with asking(part, path="/base/") as poller:
        assert await poller.ask("/metrics", accept="text/plain") == Answer(200, b"1")
        assert await poller.ask("/diff", b"{}") == Answer(200, b"2")
    first, second = part.heads
    assert part.connections == 1
    assert first.startswith(b"GET /base/metrics HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in first
    assert b"Accept: text/plain\r\n" in first
    assert second.startswith(b"POST /base/diff HTTP/1.1\r\n")
    assert second.endswith(b"\r\n\r\n{}")


async def test_concurrent_requests_do_not_share_a_connection() -> None:
    part = Part()
    part.held.clear()
    async with asking(part) as poller:
        asked = [asyncio.create_task(poller.ask("/")) for _ in range(3)]
        for _ in asked:
            await part.asked.acquire()
        part.held.set()
        assert {found.body for found in await asyncio.gather(*asked)} == {b"1", b"2", b"3"}
    assert part.connections == 3


async def test_a_refusal_is_an_answer() -> None:
    part = Part()
    part.say = lambda count: answer(b"no", b"403 Forbidden")
    async with asking(part) as poller:
        assert await poller.ask("/") == Answer(403, b"no")


async def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    part = Part()
    async with asking(part) as poller:
        await poller.ask("/")
        part.writers[0].close()
        await part.writers[0].wait_closed()
        assert await poller.ask("/") == Answer(200, b"2")
    assert part.connections == 2


async def test_a_connection_that_the_server_wants_closed_is_not_used_again() -> None:
    part = Part()
    part.say = lambda count: answer(b"%d" % count, more=b"Connection: close\r\n")
    async with asking(part) as poller:
        assert [(await poller.ask("/")).body for _ in range(2)] == [b"1", b"2"]
    assert part.connections == 2


async def test_an_answer_that_was_given_up_is_not_taken_for_the_next_one() -> None:
    part = Part()
    part.held.clear()
    async with asking(part) as poller:
        given_up = asyncio.create_task(poller.ask("/"))
        await part.asked.acquire()
        given_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await given_up
        part.held.set()
        assert await poller.ask("/") == Answer(200, b"2")


async def test_data_after_a_response_is_not_taken_for_the_next_one() -> None:
    part = Part()
    part.say = lambda count: answer(b"%d" % count) + answer(b"unasked")
    async with asking(part) as poller:
        assert [(await poller.ask("/")).body for _ in range(2)] == [b"1", b"2"]
    assert part.connections == 2


async def test_what_comes_while_a_connection_is_idle_is_not_taken_for_an_answer() -> None:
    part = Part()
    async with asking(part) as poller:
        await poller.ask("/")
        part.writers[0].write(answer(b"unasked"))
        other = HttpPoller("the part", poller.url, None, timeout_s=5)
        await other.ask("/")  # data written before has arrived when this response arrives
        other.close()
        assert await poller.ask("/") == Answer(200, b"3")
    assert part.connections == 3


async def test_an_idle_connection_is_closed() -> None:
    part = Part()
    async with asking(part, idle_s=0.01) as poller:
        await poller.ask("/")
        async with asyncio.timeout(5):
            await part.writers[0].wait_closed()
        assert await poller.ask("/") == Answer(200, b"2")


async def test_a_part_that_is_silent_is_given_up_in_time() -> None:
    part = Part()
    part.held.clear()
    async with asking(part, timeout_s=0.05) as poller:
        with pytest.raises(Unavailable, match="the part did not respond in time"):
            await poller.ask("/")


async def test_a_part_that_is_not_there_cannot_be_reached() -> None:
    async with await asyncio.start_server(Part().talk, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
    poller = HttpPoller("the part", f"http://127.0.0.1:{port}", None, timeout_s=5)
    with pytest.raises(Unavailable, match="the part cannot be reached"):
        await poller.ask("/")


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 0000200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000 + b"\r\n\r\n",
        b"SSH-2.0-server\r\n\r\n",
        b"x" * 70_000,
    ],
    ids=[
        "no length",
        "no status",
        "negative length",
        "two lengths",
        "long status",
        "endless length",
        "another protocol",
        "endless head",
    ],
)
async def test_what_is_no_answer_of_a_part_is_not_known(said: bytes) -> None:
    part = Part()
    part.say = lambda count: said
    async with asking(part) as poller:
        with pytest.raises(Unavailable, match="the part"):
            await poller.ask("/")


async def test_an_answer_that_is_too_large_is_not_read() -> None:
    part = Part()
    part.say = lambda count: b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n"
    async with asking(part) as poller:
        with pytest.raises(LimitExceeded, match="16 MiB"):
            await poller.ask("/")


async def test_without_a_plain_address_no_request_is_sent() -> None:
    poller = HttpPoller("the part", "https://127.0.0.1:1", None, timeout_s=5)
    with pytest.raises(Unavailable, match="http://"):
        await poller.ask("/")
