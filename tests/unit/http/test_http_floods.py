"""The cost of a client before it presents a key: bytes held, and work of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import h2.settings
import pytest
from hpack import Encoder
from tests.unit.http.test_http2 import Peer, dial
from tests.unit.servers.doubles import Running, get, post, running, until

from penstock.http import HttpLimits
from penstock.http.h2 import PREFACE, H2Connection
from penstock.http.h2_stream import H2Stream, MalformedHead, next_turn
from penstock.testing import ManualClock

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + b"penstock"
WINDOW = bytes([0, 0, 4, 8, 0, 0, 0, 0, 0]) + (1).to_bytes(4, "big")
PRIORITY = bytes([0, 0, 5, 2, 0, 0, 0, 0, 1]) + bytes(4) + b"\x10"
UNKNOWN = bytes([0, 0, 0, 99, 0, 0, 0, 0, 0])
HEAD = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"x")]
CALM = 11


def frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


def held(server: Running) -> int:
    assert server.listener._host is not None
    return server.listener._host.budget.held


async def goaway(peer: Peer) -> int | None:
    while peer.goaway is None and await peer.read():
        pass
    return peer.goaway


async def test_no_http_2_body_is_kept_for_a_client_without_a_key() -> None:
    async with running("k") as server:
        peer = await dial(server)
        stream = peer.ask("POST", "/v0/topics/x", end=False, more=[("content-length", "60000")])
        assert (await peer.answer(stream)).status == 401
        await until(lambda: held(server) == 0)


async def test_an_answered_http_2_request_is_freed_without_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        async with running("k") as server:
            peer = await dial(server)
            for _ in range(30):
                assert (await peer.answer(peer.ask("GET", "/v0/topics/x"))).status == 401
            kept = [one for one in gc.get_objects() if isinstance(one, H2Stream)]
            assert len(kept) < 5
    finally:
        gc.enable()


async def test_small_http_2_bodies_count_from_their_first_byte_until_released() -> None:
    async with running() as server:
        peer = await dial(server)
        for _ in range(50):
            stream = peer.ask("POST", "/v0/topics/x", end=False, more=[("content-length", "60000")])
            peer.h2.send_data(stream, b"x" * 1000)
        peer.flush()
        await until(lambda: held(server) >= 50 * 5000)  # each with its stream
        await peer.wire.close()
        await until(lambda: held(server) == 0)


async def test_small_http_1_bodies_and_partial_heads_count_from_their_first_byte() -> None:
    async with running("k") as server:
        half_body, half_head = await server.dial(), await server.dial()
        half_body.send(post("/v0/topics/x", b"x" * 60_000)[:-10])
        half_head.send(get("/v0/health", "X: " + "y" * 30_000)[:-2])
        await until(lambda: held(server) >= 89_000)
        await half_body.close()
        await half_head.close()
        await until(lambda: held(server) == 0)


@pytest.mark.parametrize("http2", [False, True])
async def test_when_the_budget_is_spent_small_bodies_are_refused(http2: bool) -> None:
    async with running("k", limits=HttpLimits(held_bytes_max=100_000)) as server:
        hoarders = [await server.dial() for _ in range(3)]
        for wire in hoarders:
            wire.send(post("/v0/topics/x", b"x" * 60_000)[:-10])
        await until(lambda: held(server) >= 100_000)
        if http2:
            peer = await dial(server)
            assert (await peer.answer(peer.post("/v0/topics/x", b"{}"))).status == 429
        else:
            wire = await server.dial()
            wire.send(post("/v0/topics/x", b"{}"))
            assert (await wire.answer()).status == 429
        assert held(server) < 200_000


async def test_requests_of_one_read_wait_as_unparsed_bytes() -> None:
    async with running() as server:
        server.engine.committers.hold()
        wire = await server.dial()
        wire.send(post("/v0/topics/x", b'{"records":[{"data":1}]}') + get("/v0/health") * 5000)
        await until(lambda: held(server) > 5000)
        (connection,) = server.listener._host.connections  # type: ignore[union-attr]
        assert len(connection._waiting) < 300  # type: ignore[attr-defined]
        server.engine.committers.release()
        assert (await wire.answer()).status == 201
        for _ in range(5000):
            assert (await wire.answer()).status == 200
        await until(lambda: held(server) == 0)


async def test_more_headers_than_allowed_are_refused_however_short() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(get("/v0/health", *["a:b"] * 300))
        assert (await wire.answer()).status == 400
        peer = await dial(server)
        peer.ask("GET", "/v0/health", more=[("a", "b")] * 300)
        peer.flush()
        assert await goaway(peer) == 1


async def test_a_header_list_above_its_cap_ends_the_connection_while_it_is_decoded() -> None:
    async with running(limits=HttpLimits(head_bytes_max=8192)) as server:
        peer = await dial(server)
        await peer.answer(peer.ask("GET", "/v0/health"))
        assert peer.h2.remote_settings[h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE] == 8192
        peer.ask("GET", "/v0/health", more=[("x", "v" * 3000)] * 4)
        peer.flush()
        assert await goaway(peer) == CALM


def test_a_repeated_long_header_is_checked_in_time_independent_of_its_length() -> None:
    """The check works on whole values: one interpreter step per character would be a million steps here."""
    import sys

    steps = 0

    def count(*_: object) -> object:
        nonlocal steps
        steps += 1
        return count

    fields = [*HEAD, *[(b"x-a", b"v" * 60_000)] * 16]
    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        H2Stream(1, fields)
    finally:
        sys.settrace(before)
    assert steps < 2000


@pytest.mark.parametrize(
    "fields",
    [
        HEAD[1:],
        [*HEAD, (b":method", b"GET")],
        [*HEAD, (b"X-Upper", b"a")],
        [*HEAD, (b"", b"a")],
        [*HEAD, (b"a", b"b\r\nc: d")],
        [*HEAD, (b"a", b" b")],
        [*HEAD, (b"a", b"b\0")],
        [*HEAD, (b"connection", b"close")],
        [*HEAD, (b"te", b"gzip")],
        [*HEAD, (b"host", b"other")],
        [(b"a", b"b"), *HEAD],
        [*HEAD, (b":status", b"200")],
    ],
)
def test_a_head_that_breaks_the_rules_of_http_2_is_refused(fields: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(MalformedHead):
        H2Stream(1, fields)


def test_the_same_host_twice_is_one_host() -> None:
    head = H2Stream(1, [*HEAD, (b"host", b"x"), (b"cookie", b"a"), (b"cookie", b"b")]).head()
    assert (head.headers[b"host"], head.headers[b"cookie"]) == (b"x", b"a, b")


@pytest.mark.parametrize("idle", [SETTINGS, PING, WINDOW, PRIORITY, UNKNOWN], ids=lambda data: data[3])
async def test_a_flood_of_idle_frames_ends_the_connection(idle: bytes) -> None:
    async with running(clock=ManualClock()) as server:  # no second passes, so nothing else can end it
        peer = await dial(server)
        peer.wire.send(idle * 5000)
        stream = peer.ask("GET", "/v0/health")
        peer.flush()
        with contextlib.suppress(ConnectionResetError):
            while stream not in peer.ended and await peer.read():
                pass
        assert stream not in peer.ended, "what follows the flood was answered"
        await server.settled(0)
        await until(lambda: held(server) == 0)


async def test_empty_pieces_of_a_body_are_a_flood_too() -> None:
    async with running() as server:
        wire = await server.dial()
        block = Encoder().encode([(b":method", b"POST"), *HEAD[1:]])
        wire.send(PREFACE + SETTINGS + frame(1, 4, 1, block) + frame(0, 0, 1) * 5000)
        while await wire.reader.read(65536):
            pass
        await server.settled(0)


@pytest.mark.parametrize("data", [b"", b"\0"])
async def test_a_flood_of_continuations_ends_the_connection_before_it_is_kept(data: bytes) -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(PREFACE + SETTINGS + frame(1, 0, 1, b"\x82") + frame(9, 0, 1, data) * 5000)
        while await wire.reader.read(65536):
            pass
        await server.settled(0)
        await until(lambda: held(server) == 0)


async def test_a_flood_does_not_starve_other_connections() -> None:
    """Handling one read of a flood takes many short turns of the loop."""
    async with running(limits=HttpLimits(idle_frames_per_tick_max=1_000_000)) as server:
        flooding = await server.dial()
        flooding.send(PREFACE + SETTINGS + PRIORITY * 10_000)
        await until(lambda: held(server) > 0)
        wire = await server.dial()
        wire.send(get("/v0/health"))
        assert (await wire.answer()).status == 200
        assert held(server) > 0, "the flood was over before the other client was answered"


def test_a_turn_ends_after_its_work_and_keeps_the_frames_of_a_head_together() -> None:
    assert next_turn(PING * 100, 64).size == 64 * len(PING)
    assert next_turn(PING[:-1], 64).size == 0
    head = frame(1, 0, 1, b"\x82") + frame(9, 0, 1, b"\x84")
    assert next_turn(head, 1).size == 0
    whole = head + frame(9, 4, 1)
    assert next_turn(whole + PING, 1).size == len(whole)
    assert next_turn(frame(1, 0, 1) + frame(9, 0, 1) * 40, 64).is_flood


async def test_responses_blocked_by_a_zero_window_count_and_the_client_is_disconnected() -> None:
    async with running(limits=HttpLimits(write_timeout_s=3)) as server:
        peer = await dial(server, window=0)
        for _ in range(20):
            peer.ask("GET", "/v0/health")
        peer.flush()
        await until(lambda: held(server) > 20 * 4096)
        for _ in range(5):
            server.listener.tick()
        await server.settled(0)
        await until(lambda: held(server) == 0)


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(4, 0, 0, b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in pairs))


async def test_settings_that_the_server_does_not_know_are_not_kept() -> None:
    """If kept, 65,520 settings take 50 MB, and each further settings frame takes milliseconds."""
    async with running("k") as server:
        peer = await dial(server)
        for first in range(16, 65_000, 2_700):
            peer.wire.send(settings(*((key, 1) for key in range(first, min(first + 2_700, 65_536)))))
        assert (await peer.answer(peer.ask("GET", "/v0/health"))).status == 200
        (connection,) = server.listener._host.connections  # type: ignore[union-attr]
        assert len(connection._h2.remote_settings) < 16  # type: ignore[attr-defined]


async def test_a_client_cannot_grow_the_table_of_sent_headers() -> None:
    async with running() as server:
        peer = await dial(server)
        peer.wire.send(settings((1, 2**32 - 1)))
        for length in range(1, 200):
            assert (await peer.answer(peer.ask("GET", "/" + "q" * length))).status == 404
        (connection,) = server.listener._host.connections  # type: ignore[union-attr]
        assert connection._h2.encoder.header_table_size <= 4096  # type: ignore[attr-defined]
        peer.wire.send(settings((1, 0)))
        assert (await peer.answer(peer.ask("GET", "/v0/health"))).status == 200
        assert connection._h2.encoder.header_table_size == 0  # type: ignore[attr-defined]


async def test_tiny_windows_are_a_flood() -> None:
    """Each byte of window becomes its own frame with almost no content."""
    async with running(limits=HttpLimits(idle_frames_per_tick_max=200)) as server:
        peer = await dial(server, window=0)
        stream = peer.ask("GET", "/metrics")
        peer.flush()
        peer.wire.send(frame(8, 0, stream, (1).to_bytes(4, "big")) * 300)
        while await peer.wire.reader.read(65536):
            pass
        await server.settled(0)


async def test_a_request_cancelled_while_it_waits_is_dropped() -> None:
    async with running(limits=HttpLimits(outbox_bytes_max=0)) as server:
        peer = await dial(server, window=0)
        peer.ask("GET", "/v0/health")
        waiting = [peer.ask("GET", "/v0/health") for _ in range(20)]
        for stream in waiting:
            peer.h2.reset_stream(stream)
        last = peer.ask("GET", "/v0/health")
        peer.flush()
        await peer.read()
        (connection,) = server.listener._host.connections  # type: ignore[union-attr]
        await until(lambda: last in connection._streams)  # type: ignore[attr-defined]
        assert len(connection._waiting) <= 1  # type: ignore[attr-defined]


async def test_an_ignored_upgrade_keeps_the_other_connection_options() -> None:
    async with running() as server:
        for options in ("Upgrade, close", "close, Upgrade", "upgrade , Close"):
            wire = await server.dial()
            wire.send(get("/v0/health", f"Connection: {options}", "Upgrade: h2c"))
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert await wire.end() == b""


WISH = "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="


async def test_a_client_of_http_1_0_cannot_change_the_protocol() -> None:
    async with running() as server:
        for path, status in (("/v0/health", 200), ("/v0/ws", 400)):
            wire = await server.dial()
            wire.send(get(path, "Connection: Upgrade", *WISH).replace(b"HTTP/1.1", b"HTTP/1.0"))
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            assert await wire.end() == b""


async def test_an_upgrade_requires_the_complete_connection_option() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(get("/v0/ws", "Connection: no-upgrade", *WISH))
        assert (await wire.answer()).status == 400


async def test_two_hosts_are_refused() -> None:
    async with running() as server:
        wire = await server.dial()
        wire.send(get("/v0/health", "Host: y"))
        assert (await wire.answer()).status == 400


def test_a_turn_counts_the_bytes_of_a_head() -> None:
    """A byte of a head may be a header: one turn handles few heads of 1 KiB, and many of 30 bytes."""
    long, short = frame(1, 5, 1, b"\x82" * 1024), frame(1, 5, 1, b"\x82" * 30)
    assert next_turn(long * 10, 64).size == len(long)
    assert next_turn(short * 100, 64).size > 10 * len(short)
    parts = frame(1, 0, 1, b"\x82") + frame(9, 4, 1, b"\x82" * 1023)
    assert next_turn(parts * 10, 64).size == len(parts)


@pytest.mark.parametrize(("sizes", "is_answered"), [(b"\x20\x3f\xe1\x1f", True), (b"\x20" * 3, False)])
async def test_too_many_table_size_updates_in_a_head_end_the_connection(
    sizes: bytes, is_answered: bool
) -> None:
    """Each update is a byte of work outside the header list; two are enough for any client."""
    async with running("k") as server:
        wire = await server.dial()
        block = Encoder().encode(HEAD)
        wire.send(PREFACE + SETTINGS + frame(1, 5, 1, block) + frame(1, 5, 3, sizes + block) + PING)
        received = b""
        while b"penstock" not in received and (data := await wire.reader.read(65536)):
            received += data
        assert (b"penstock" in received) == is_answered


def _window(value: int) -> bytes:
    return settings((h2.settings.SettingCodes.INITIAL_WINDOW_SIZE, value))


async def _http2_connection(server: Running) -> H2Connection:
    """Return the only client's connection, once its first bytes have arrived."""
    assert server.listener._host is not None
    connections = server.listener._host.connections
    await until(lambda: any(isinstance(one, H2Connection) for one in connections))
    (connection,) = connections
    assert isinstance(connection, H2Connection)
    return connection


async def test_initial_window_updates_by_one_byte_are_a_flood() -> None:
    """One frame of 15 bytes would make every stream send a frame of one byte."""
    async with running(limits=HttpLimits(idle_frames_per_tick_max=300)) as server:
        peer = await dial(server, window=0)
        for _ in range(100):
            peer.ask("GET", "/metrics")
        peer.flush()
        connection = await _http2_connection(server)
        await until(lambda: len(connection._streams) == 100)
        value = 0
        while not connection._is_closed:
            value += 1
            peer.wire.send(_window(value))
            await asyncio.sleep(0)
        assert value < 100
        await server.settled(0)


async def test_an_initial_window_change_costs_in_proportion_to_open_streams() -> None:
    async with running(limits=HttpLimits(idle_frames_per_tick_max=50)) as server:
        peer = await dial(server, window=0)
        for _ in range(640):
            peer.ask("GET", "/v0/health")
        peer.flush()
        connection = await _http2_connection(server)
        await until(lambda: len(connection._streams) == 640)
        frames = 0
        while not connection._is_closed:
            frames += 1
            peer.wire.send(_window(0))
            await asyncio.sleep(0)
        assert frames < 50
        await server.settled(0)


async def test_a_frame_costs_nothing_for_streams_with_closed_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as server:
        peer = await dial(server, window=0)
        streams = [peer.ask("GET", "/v0/health") for _ in range(300)]
        peer.flush()
        connection = await _http2_connection(server)
        await until(lambda: sum(1 for one in connection._streams.values() if one.outbox) == 300)
        looks = 0
        real = connection._h2.local_flow_control_window

        def counted(stream_id: int) -> int:
            nonlocal looks
            looks += 1
            return int(real(stream_id))

        monkeypatch.setattr(connection._h2, "local_flow_control_window", counted)
        for _ in range(20):
            peer.wire.send(PING + WINDOW)
            received = connection._received
            await until(lambda received=received: connection._received > received)  # type: ignore[misc]
        assert looks == 0
        peer.h2.increment_flow_control_window(100_000, streams[-1])
        assert (await peer.answer(streams[-1])).status == 200
        peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 100_000})
        for stream in streams[:-1]:
            assert (await peer.answer(stream)).status == 200
