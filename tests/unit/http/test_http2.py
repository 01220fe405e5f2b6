"""Cleartext HTTP/2 on the same port: many requests at once, flow control, resets and floods."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from tests.unit.servers.doubles import Answer, Running, Wire, http, running, until
from tests.unit.topics.engine_doubles import recs

from penstock.http import HttpLimits
from penstock.topics.config import TopicConfig

WRITE = b'{"records":[{"data":1}]}'


class Peer:
    """An HTTP/2 client that sends only what the test requests."""

    def __init__(self, wire: Wire, window: int = 65_535) -> None:
        self.wire = wire
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.h2.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.h2.initiate_connection()
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self.reset: dict[int, int] = {}
        self.goaway: int | None = None
        self.flush()

    def flush(self) -> None:
        self.wire.send(self.h2.data_to_send())

    def ask(self, method: str, path: str, *, end: bool = True, more: Iterable[tuple[str, str]] = ()) -> int:
        stream = self.h2.get_next_available_stream_id()
        head = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "x"), *more]
        self.h2.send_headers(stream, head, end_stream=end)
        return stream

    def post(self, path: str, body: bytes) -> int:
        stream = self.ask("POST", path, end=False, more=[("content-type", "application/json")])
        self.h2.send_data(stream, body, end_stream=True)
        return stream

    async def read(self) -> bool:
        """Receive the next data. Return False if the server has closed."""
        data = await asyncio.wait_for(self.wire.reader.read(65536), 10)
        for event in self.h2.receive_data(data) if data else ():
            self.take(event)
        return bool(data)

    def take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived):
            self.statuses[event.stream_id] = int(dict(event.headers)[b":status"])
        elif isinstance(event, h2.events.DataReceived):
            self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
        elif isinstance(event, h2.events.StreamEnded):
            self.ended.add(event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.reset[event.stream_id] = int(event.error_code)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self.goaway = int(event.error_code or 0)

    async def answer(self, stream: int) -> Answer:
        self.flush()
        while stream not in self.ended:
            assert await self.read()
        return Answer(self.statuses[stream], {}, self.bodies.get(stream, b""))


async def dial(server: Running, window: int = 65_535) -> Peer:
    return Peer(await server.dial(), window)


async def test_both_protocols_work_on_one_port() -> None:
    async with running() as server:
        for http2 in (False, True):
            async with http(server.url, http2=http2) as client:
                written = await client.post("/v0/topics/x", json={"records": [{"data": {"a": 1}}]})
                read = await client.post("/v0/topics/x/diff", json={})
                health = await client.get("/v0/health")
            assert written.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            assert (written.status_code, read.status_code, health.status_code) == (
                200 if http2 else 201,
                200,
                200,
            )
            assert read.json()["records"][0]["data"] == {"a": 1}


async def test_the_preface_may_come_in_pieces() -> None:
    async with running() as server:
        slow = await server.dial()
        for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n":
            slow.send(bytes([byte]))
            await asyncio.sleep(0.001)
        assert await slow.reader.read(9)


async def test_a_request_that_only_begins_like_the_preface_is_http_1() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(b"PRI")
        await asyncio.sleep(0.01)
        wire.send(b"NT /v0/health HTTP/1.1\r\n\r\n")
        assert (await wire.answer()).status == 400
        other = await server.dial()
        other.send(b"P")
        await asyncio.sleep(0.01)
        other.send(b"UT /v0/topics/x HTTP/1.1\r\n\r\n")
        assert (await other.answer()).status == 201


async def test_the_settings_of_the_contract_are_announced() -> None:
    async with running() as server:
        peer = await dial(server)
        await peer.answer(peer.ask("GET", "/v0/health"))
        codes, settings = h2.settings.SettingCodes, peer.h2.remote_settings
        assert settings[codes.MAX_CONCURRENT_STREAMS] == 1024
        assert settings[codes.INITIAL_WINDOW_SIZE] == 1024**2
        assert peer.h2.outbound_flow_control_window == 4 * 1024**2


async def test_many_streams_are_answered_while_one_waits() -> None:
    async with running() as server:
        await server.engine.put_topic("x", TopicConfig())
        peer = await dial(server)
        poll = peer.post("/v0/topics/x/diff", b'{"wait_ms":20000}')
        peer.flush()
        await until(lambda: server.engine.polls == 1)
        writes = [peer.post("/v0/topics/x", WRITE) for _ in range(100)]
        answers = [await peer.answer(stream) for stream in writes]
        assert sorted(answer.json()["first_seq"] for answer in answers) == list(range(1, 101))
        assert (await peer.answer(poll)).status == 200


async def test_a_large_response_waits_for_the_clients_windows() -> None:
    async with running() as server:
        await server.engine.put_topic("x", TopicConfig())
        await server.engine.write("x", recs(*["x" * 100_000] * 10))
        peer = await dial(server, window=1000)
        stream = peer.post("/v0/topics/x/diff", b"{}")
        peer.flush()
        while len(peer.bodies.get(stream, b"")) < 1000:
            await peer.read()
        assert len(peer.bodies[stream]) == 1000
        peer.h2.increment_flow_control_window(2**24, stream)
        peer.h2.increment_flow_control_window(2**24)
        answer = await peer.answer(stream)
        assert len(answer.json()["records"]) == 10  # type: ignore[arg-type]


async def test_no_request_is_started_while_unsent_responses_exceed_the_limit() -> None:
    async with running(limits=HttpLimits(outbox_bytes_max=50_000, write_timeout_s=3)) as server:
        await server.engine.put_topic("x", TopicConfig())
        await server.engine.write("x", recs("x" * 100_000))
        written = server.engine.write_count
        peer = await dial(server, window=10)
        for _ in range(50):
            peer.post("/v0/topics/x/diff", b"{}")
        peer.post("/v0/topics/x", WRITE)
        peer.flush()
        await peer.read()
        await asyncio.sleep(0.05)
        assert server.engine.write_count == written
        for _ in range(6):
            server.listener.tick()
        while await peer.read():
            pass
        assert peer.goaway is not None


async def test_a_body_larger_than_the_window_arrives_whole() -> None:
    async with running() as server:
        async with http(server.url, http2=True) as client:
            body = {"records": [{"data": "x" * 900_000}] * 8}
            answer = await client.post("/v0/topics/x", json=body)
        assert answer.json()["count"] == 8
        host = server.listener._host
        assert host is not None
        assert host.budget.held == 0


@pytest.mark.parametrize("declares", [True, False])
async def test_a_body_above_its_cap_is_refused_and_the_connection_stays_open(declares: bool) -> None:
    async with running(limits=HttpLimits(body_bytes_max=100_000)) as server:
        peer = await dial(server)
        assert (await peer.answer(peer.ask("GET", "/v0/health"))).status == 200
        more = [("content-type", "application/json")]
        more += [("content-length", "500000")] if declares else []
        stream = peer.ask("POST", "/v0/topics/x", end=False, more=more)
        if not declares:
            for _ in range(30):
                peer.h2.send_data(stream, b"x" * 16_000)
        answer = await peer.answer(stream)
        assert (answer.status, answer.code) == (413, "payload_too_large")
        assert (await peer.answer(peer.ask("GET", "/v0/health"))).status == 200


async def test_a_wrong_key_is_refused_before_a_large_body_is_read() -> None:
    async with running("secret") as server:
        peer = await dial(server)
        stream = peer.ask("POST", "/v0/topics/x", end=False, more=[("content-length", "500000")])
        assert (await peer.answer(stream)).status == 401


async def test_a_cancelled_request_ends_its_long_poll() -> None:
    async with running() as server:
        await server.engine.put_topic("x", TopicConfig())
        peer = await dial(server)
        stream = peer.post("/v0/topics/x/diff", b'{"wait_ms":20000}')
        peer.flush()
        await until(lambda: server.engine.polls == 1)
        peer.h2.reset_stream(stream)
        peer.flush()
        await until(lambda: server.engine.polls == 0)
        assert (await peer.answer(peer.ask("GET", "/v0/health"))).status == 200


async def test_a_request_sent_and_cancelled_in_one_write_keeps_the_connection_open() -> None:
    async with running("secret") as server:
        peer = await dial(server)
        stream = peer.ask("POST", "/v0/topics/x", end=False, more=[("content-length", "500000")])
        peer.h2.reset_stream(stream)
        health = peer.ask("GET", "/v0/health")
        assert (await peer.answer(health)).status == 200


async def test_a_client_that_cancels_hundreds_of_requests_is_disconnected() -> None:
    async with running(limits=HttpLimits(resets_per_tick_max=50)) as server:
        peer = await dial(server)
        for _ in range(60):
            peer.h2.reset_stream(peer.ask("GET", "/v0/topics", end=False))
        peer.flush()
        while await peer.read():
            pass
        assert peer.goaway == 0xB


async def test_more_streams_than_allowed_end_the_connection() -> None:
    async with running(limits=HttpLimits(streams_max=5)) as server:
        peer = await dial(server)
        for _ in range(6):
            peer.ask("POST", "/v0/topics/x", end=False)
        peer.flush()
        while await peer.read():
            pass
        assert peer.goaway is not None
        await server.settled(0)


async def test_a_silent_client_is_pinged_and_then_disconnected() -> None:
    async with running(limits=HttpLimits(ping_interval_s=3, ping_timeout_s=3)) as server:
        peer = await dial(server)
        await peer.answer(peer.ask("GET", "/v0/health"))
        peer.flush()
        await asyncio.sleep(0.02)
        for _ in range(4):
            server.listener.tick()
        await peer.read()
        peer.flush()
        await asyncio.sleep(0.02)
        for _ in range(6):
            server.listener.tick()
        assert server.listener.connections == 1
        for _ in range(3):
            server.listener.tick()
        await server.settled(0)


async def test_a_stalled_body_ends_only_its_own_stream() -> None:
    async with running(limits=HttpLimits(body_timeout_s=3)) as server:
        peer = await dial(server)
        stream = peer.ask("POST", "/v0/topics/x", end=False)
        assert (await peer.answer(peer.ask("GET", "/v0/health"))).status == 200
        for _ in range(5):
            server.listener.tick()
        while stream not in peer.reset:
            await peer.read()
        assert (await peer.answer(peer.ask("GET", "/v0/health"))).status == 200


@pytest.mark.parametrize("seed", range(40))
async def test_garbage_after_the_preface_only_closes_that_connection(seed: int) -> None:
    rng = random.Random(seed)
    async with running() as server:
        peer = await dial(server)
        stream = peer.post("/v0/topics/x", WRITE)
        assert (await peer.answer(stream)).status == 201
        peer.post("/v0/topics/x", WRITE)
        data = bytearray(peer.h2.data_to_send())
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        peer.wire.send(bytes(data) + rng.randbytes(rng.randrange(200)))
        peer.wire.writer.write_eof()
        await asyncio.wait_for(peer.wire.reader.read(), 10)
        other = await dial(server)
        assert (await other.answer(other.ask("GET", "/v0/health"))).status == 200
