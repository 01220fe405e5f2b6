"""HTTP/1.1 as bytes on a socket: well-formed requests, malformed ones, and timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

import pytest
from tests.unit.servers.doubles import get, post, running, until

from penstock.http import HttpLimits
from penstock.topics.config import TopicConfig

CHUNKED = (
    b"POST /v0/topics/x HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)
WRITE = b'{"records":[{"data":1}]}'


async def test_a_connection_serves_many_requests() -> None:
    async with running() as server:
        wire = await server.dial()
        for seq in (1, 2, 3):
            wire.send(post("/v0/topics/x", WRITE))
            answer = await wire.answer()
            assert (answer.status, answer.json()["first_seq"]) == (201 if seq == 1 else 200, seq)
            assert answer.headers["content-type"] == "application/json"
            assert "date" in answer.headers
            assert "connection" not in answer.headers


@pytest.mark.parametrize("is_quick", [True, False])
async def test_pipelined_requests_are_answered_in_order(is_quick: bool) -> None:
    async with running(is_quick=is_quick) as server:
        wire = await server.dial()
        wire.send(b"".join([post("/v0/topics/x", WRITE), get("/v0/topics/x")] * 200))
        for round_ in range(1, 201):
            assert (await wire.answer()).json()["first_seq"] == round_
            assert (await wire.answer()).json()["head_seq"] == round_


async def test_a_request_may_come_byte_by_byte() -> None:
    async with running() as server:
        wire = await server.dial()
        for byte in post("/v0/topics/x?return_seqs=false", WRITE, "X-Odd: a"):
            wire.send(bytes([byte]))
            await wire.writer.drain()
            await asyncio.sleep(0)
        answer = await wire.answer()
        assert answer.status == 201
        assert "seqs" not in answer.json()


async def test_chunked_bodies_are_put_together_and_trailers_ignored() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(
            b"POST /v0/topics/x HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
            b'9;ext=1\r\n{"records\r\n' + b'f\r\n":[{"data":1}]}\r\n'
        )
        wire.send(b"0\r\nContent-Type: text/plain\r\n\r\n")
        assert (await wire.answer()).status == 201


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v0/health HTTP/9.9\r\n\r\n",
        b"FROBNICATE /v0/health HTTP/1.1\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nBad Header: x\r\n\r\n",
        b"GET /v0/health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"POST /v0/topics/x HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v0/topics/x HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        CHUNKED + b"zz\r\nab\r\n",
        CHUNKED + b"2\r\nabcdef\r\n0\r\n\r\n",
    ],
)
async def test_input_that_is_not_http_is_refused_and_the_connection_closed(data: bytes) -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(data)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert answer.headers["connection"] == "close"
        assert await wire.end() == b""
        assert server.engine.write_count == 0


async def test_requests_before_a_malformed_one_are_still_answered() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(post("/v0/topics/x", WRITE) + get("/v0/topics/x") + b"nonsense\r\n\r\n")
        assert [(await wire.answer()).status for _ in range(3)] == [201, 200, 400]
        assert await wire.end() == b""


@pytest.mark.parametrize("step", [512, 300_000])
async def test_a_head_above_its_cap_is_refused(step: int) -> None:
    async with running() as server:
        wire = await server.dial()
        data = b"GET /v0/health HTTP/1.1\r\nX-Long: " + b"a" * 200_000 + b"\r\n\r\n"
        for start in range(0, len(data), step):
            wire.send(data[start : start + step])
        answer = await wire.answer()
        assert (answer.status, answer.code) == (400, "invalid_request")


async def test_endless_trailers_and_chunk_extensions_are_refused() -> None:
    for endless in (b"0\r\nX-Trailer: ", b"1;ext="):
        async with running() as server:
            wire = await server.dial()
            wire.send(CHUNKED + endless)
            for _ in range(200):
                wire.send(b"a" * 1000)
                await wire.writer.drain()
                await asyncio.sleep(0)
            assert (await wire.answer()).status == 400


async def test_a_body_above_its_cap_is_refused_before_it_is_read() -> None:
    async with running(limits=HttpLimits(body_bytes_max=1000)) as server:
        wire = await server.dial()
        head = b"POST /v0/topics/x HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        wire.send(head % 100_000_000)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (413, "payload_too_large")


async def test_a_client_that_sends_its_whole_body_first_still_reads_why_it_was_refused() -> None:
    async with running(limits=HttpLimits(body_bytes_max=1000)) as server:
        wire = await server.dial()
        wire.send(post("/v0/topics/x", b"x" * 5_000_000))
        await wire.writer.drain()
        answer = await wire.answer()
        assert (answer.status, answer.code) == (413, "payload_too_large")


async def test_a_chunked_body_is_cut_off_at_the_cap() -> None:
    async with running(limits=HttpLimits(body_bytes_max=100_000)) as server:
        wire = await server.dial()
        wire.send(CHUNKED)
        for _ in range(20):
            wire.send(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert (await wire.answer()).code == "payload_too_large"


async def test_a_body_of_exactly_the_cap_is_read() -> None:
    body = b'{"records":[{"data":1}]' + b" " * 200 + b"}"
    async with running(limits=HttpLimits(body_bytes_max=len(body))) as server:
        wire = await server.dial()
        wire.send(post("/v0/topics/x", body))
        assert (await wire.answer()).status == 201


async def test_bodies_over_all_connections_stay_within_the_budget_and_give_it_back() -> None:
    limits = HttpLimits(held_bytes_max=300_000, body_screened_bytes=1000)
    async with running(limits=limits) as server:
        hog, other = await server.dial(), await server.dial()
        hog.send(post("/v0/topics/x", b"x" * 250_000)[:-1])
        await hog.writer.drain()
        await asyncio.sleep(0.05)
        other.send(post("/v0/topics/x", b"x" * 100_000))
        answer = await other.answer()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "throttled", "1")
        await hog.close()
        await other.close()
        await server.settled(0)
        again = await server.dial()
        again.send(post("/v0/topics/x", b'{"records":[{"data":"' + b"x" * 200_000 + b'"}]}'))
        assert (await again.answer()).status == 201
        await again.close()
        await server.settled(0)
        host = server.listener._host
        assert host is not None
        assert host.budget.held == 0


async def test_expect_100_continue_is_answered_before_the_body() -> None:
    async with running() as server:
        wire = await server.dial()
        head, body = post("/v0/topics/x", WRITE, "Expect: 100-continue").split(b"\r\n\r\n")
        wire.send(head + b"\r\n\r\n")
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.send(body)
        assert (await wire.answer()).status == 201


async def test_a_wrong_key_is_refused_before_100_continue() -> None:
    async with running("secret") as server:
        wire = await server.dial()
        head = post("/v0/topics/x", WRITE, "Expect: 100-continue").split(b"\r\n\r\n")[0]
        wire.send(head + b"\r\n\r\n")
        assert (await wire.answer()).status == 401


async def test_an_upgrade_request_is_ignored_and_its_body_still_read() -> None:
    async with running() as server:
        wire = await server.dial()
        upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
        wire.send(post("/v0/topics/x", WRITE, *upgrade) + get("/v0/topics/x"))
        assert (await wire.answer()).status == 201
        assert (await wire.answer()).json()["head_seq"] == 1
        wire.send(get("/v0/topics/x", *upgrade))
        assert (await wire.answer()).status == 200


async def test_this_server_is_not_a_proxy() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
        assert (await wire.answer()).status == 400


async def test_a_target_in_absolute_form_is_understood() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(get("http://x/v0/health"))
        assert (await wire.answer()).status == 200


async def test_connection_close_and_http_1_0_end_the_connection() -> None:
    async with running() as server:
        for data in (
            get("/v0/health", "Connection: close"),
            b"GET /v0/health HTTP/1.0\r\n\r\n",
            b"GET /v0/health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        ):
            wire = await server.dial()
            wire.send(data)
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await wire.end() == b""


async def test_head_is_refused_without_a_body() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(b"HEAD /v0/health HTTP/1.1\r\nHost: x\r\n\r\n" + get("/v0/health"))
        head = await wire.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405 ")
        assert b"allow: GET" in head
        assert (await wire.answer()).status == 200


async def test_a_client_that_sends_a_partial_head_is_disconnected() -> None:
    async with running(limits=HttpLimits(head_timeout_s=3)) as server:
        fresh, silent = await server.dial(), await server.dial()
        fresh.send(b"GET /v0/hea")
        await server.settled(2)
        await asyncio.sleep(0.02)
        for _ in range(5):
            server.listener.tick()
        await server.settled(0)
        assert await fresh.end() == await silent.end() == b""


async def test_a_slow_head_does_not_extend_the_timeout() -> None:
    async with running(limits=HttpLimits(head_timeout_s=5)) as server:
        wire = await server.dial()
        wire.send(b"GET /v0/health HTTP/1.1\r\n")
        for _ in range(8):
            await asyncio.sleep(0.005)
            server.listener.tick()
            if server.listener.connections:
                wire.send(b"X-More: 1\r\n")
        await server.settled(0)


async def test_a_stalled_body_times_out_and_a_moving_one_does_not() -> None:
    async with running(limits=HttpLimits(body_timeout_s=3)) as server:
        wire = await server.dial()
        data = post("/v0/topics/x", b'{"records":[{"data":"0123456789"}]}')
        wire.send(data[:-20])
        for byte in data[-20:-1]:
            wire.send(bytes([byte]))
            await asyncio.sleep(0.003)
            server.listener.tick()
        assert server.listener.connections == 1
        for _ in range(6):
            server.listener.tick()
        await server.settled(0)


async def test_an_idle_connection_is_kept_for_its_time_only() -> None:
    async with running(limits=HttpLimits(idle_timeout_s=5)) as server:
        wire = await server.dial()
        wire.send(get("/v0/health"))
        await wire.answer()
        for _ in range(5):
            server.listener.tick()
        assert server.listener.connections == 1
        server.listener.tick()
        await server.settled(0)


async def test_a_client_that_does_not_read_its_response_is_disconnected() -> None:
    async with running(limits=HttpLimits(write_timeout_s=3)) as server:
        wire = await server.dial()
        wire.send(post("/v0/topics/x", json.dumps({"records": [{"data": "x" * 900_000}] * 20}).encode()))
        await wire.answer()
        wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
        wire.send(post("/v0/topics/x/diff", b"{}") * 20)
        await asyncio.sleep(0.05)
        host = server.listener._host
        assert host is not None
        assert host.budget.held > 0
        for _ in range(5):
            server.listener.tick()
        await server.settled(0)
        assert host.budget.held == 0


async def test_connections_above_the_limit_are_refused() -> None:
    async with running(limits=HttpLimits(connections_max=2)) as server:
        held = [await server.dial() for _ in range(2)]
        await server.settled(2)
        answer = await (await server.dial()).answer()
        assert (answer.status, answer.code) == (429, "throttled")
        await held[0].close()
        await server.settled(1)
        wire = await server.dial()
        wire.send(get("/v0/health"))
        assert (await wire.answer()).status == 200


async def test_a_write_whose_client_leaves_is_still_finished() -> None:
    async with running() as server:
        server.engine.committers.hold()
        wire = await server.dial()
        wire.send(post("/v0/topics/x", WRITE))
        await until(lambda: bool(server.engine.write_count))
        wire.writer.transport.abort()
        await asyncio.sleep(0.01)
        server.engine.committers.release()
        await server.settled(0)
        assert await server.engine.contents("x") == [b"1"]


async def test_a_response_to_an_aborted_connection_is_dropped() -> None:
    async with running() as server:
        server.engine.committers.hold()
        wire = await server.dial()
        wire.send(post("/v0/topics/x", WRITE) * 3)
        await until(lambda: bool(server.engine.write_count))
        host = server.listener._host
        assert host is not None
        # The commit happens in the same turn of the loop, before the connection knows that it is lost.
        server.engine.committers.release()
        for connection in list(host.connections):
            connection.abort()
        await server.settled(0)
        assert await server.engine.contents("x") == [b"1"]


async def test_a_client_that_only_stops_sending_still_gets_its_responses() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(post("/v0/topics/x", WRITE) * 3)
        wire.writer.write_eof()
        assert [(await wire.answer()).status for _ in range(3)] == [201, 200, 200]
        assert await wire.end() == b""


async def test_a_long_poll_ends_when_its_client_leaves() -> None:
    async with running() as server:
        await server.engine.put_topic("x", TopicConfig())
        wire = await server.dial()
        wire.send(post("/v0/topics/x/diff", b'{"wait_ms":30000}'))
        await until(lambda: bool(server.engine.polls))
        await wire.close()
        await server.settled(0)
        await until(lambda: not server.engine.polls)


async def test_blanks_before_the_content_type_do_no_harm() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(post("/v0/topics/x", WRITE).replace(b"Content-Type: ", b"Content-Type: \t  "))
        assert (await wire.answer()).status == 201


@pytest.mark.parametrize("seed", range(60))
async def test_damaged_requests_only_close_their_own_connection(seed: int) -> None:
    rng = random.Random(seed)
    async with running() as server:
        data = bytearray(
            b"".join([post("/v0/topics/x", WRITE), CHUNKED, b"5\r\nabcde\r\n0\r\n\r\n", get("/v0/topics")])
        )
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        wire = await server.dial()
        for start in range(0, len(data), 64):
            wire.send(bytes(data[start : start + 64]))
            await asyncio.sleep(0)
        wire.writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await wire.end()
        other = await server.dial()
        other.send(get("/v0/health"))
        assert (await other.answer()).status == 200
        await other.close()
        await server.settled(0)
        host = server.listener._host
        assert host is not None
        assert host.budget.held == 0
