"""A WebSocket below its commands: silence, fragments, overload, and input during the shutdown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.servers.topics.live_doubles import FakeSink, Watching
from tests.unit.topics.engine_doubles import World, recs, settle
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, Protocol

from penstock.http.auth import ANYONE
from penstock.servers.topics import websocket
from penstock.servers.topics.websocket import WebSocket
from penstock.servers.topics.websocket_messages import InvalidMessage, read_command
from penstock.topics import TopicConfig


class FakeClient(FakeSink):
    """The connection of a WebSocket, with a client at its other end that decodes the frames."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = False
        self.room = 2**40
        self.held = 0
        self._protocol = Protocol(CLIENT)
        self._read = 0

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def hold(self, size: int) -> bool:
        if size > self.room:
            return False
        self.held = size
        return True

    def frames(self) -> list[Frame]:
        """Return what was written since the last call."""
        data = b"".join(self.pieces)[self._read :]
        self._read += len(data)
        self._protocol.receive_data(data)
        return [frame for frame in self._protocol.events_received() if isinstance(frame, Frame)]

    def messages(self) -> list[dict[str, Any]]:
        return [json.loads(bytes(frame.data)) for frame in self.frames() if frame.opcode is Opcode.TEXT]


def masked(message: object, opcode: Opcode = Opcode.TEXT, fin: bool = True) -> bytes:
    data = message if isinstance(message, bytes) else json.dumps(message).encode()
    return Frame(opcode, data, fin).serialize(mask=True)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.open()
    yield made
    await made.engine.close()


@pytest.fixture
async def opened(world: World) -> tuple[WebSocket, FakeClient]:
    api = Watching(world).api
    socket = WebSocket(world.engine, api.broadcaster, api.caps, ANYONE)
    client = FakeClient()
    socket.connect(client)
    return socket, client


async def test_a_silent_client_is_pinged_and_then_disconnected(
    world: World, opened: tuple[WebSocket, FakeClient]
) -> None:
    socket, client = opened
    await world.clock.advance(20.5)
    assert [frame.opcode for frame in client.frames()] == [Opcode.PING]
    await world.clock.advance(20.5)
    assert client.is_cut
    assert not socket.is_open


async def test_a_client_that_answers_is_kept(world: World, opened: tuple[WebSocket, FakeClient]) -> None:
    socket, client = opened
    for _ in range(5):
        await world.clock.advance(20.5)
        socket.received(masked(b"penstock", Opcode.PONG))
    assert socket.is_open
    assert not client.is_cut


async def test_an_incomplete_message_counts(opened: tuple[WebSocket, FakeClient]) -> None:
    socket, client = opened
    text = json.dumps({"op": "ping", "request_id": "x" * 200_000}).encode()
    frame = masked(text)
    socket.received(frame[:100_000])
    assert 99_000 < client.held <= 100_000
    socket.received(frame[100_000:])
    assert client.held == 0
    assert [message["op"] for message in client.messages()] == ["pong"]


async def test_input_counts_from_its_first_byte(opened: tuple[WebSocket, FakeClient]) -> None:
    socket, client = opened
    frame = masked(b"x" * 1000)
    socket.received(frame[:500])
    assert client.held > 450
    socket.received(frame[500:] + frame[:500])
    assert client.held > 450, "what stands after a whole message counts, too"
    socket.received(frame[500:])
    assert client.held == 0


async def test_each_fragment_counts_with_its_overhead(
    opened: tuple[WebSocket, FakeClient],
) -> None:
    socket, client = opened
    socket.received(masked(b"", fin=False) + masked(b"", Opcode.CONT, fin=False) * 999)
    assert client.held >= 64_000
    socket.received(masked(b"{}", Opcode.CONT))
    assert client.held == 0


async def test_waiting_messages_count_until_they_start(
    world: World, opened: tuple[WebSocket, FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PUBLISHING_MAX", 1)
    await world.engine.put_topic("x", TopicConfig())
    socket, client = opened
    world.committers.hold()
    publish = masked({"op": "publish", "topic": "x", "records": [{"data": 1}]})
    socket.received(publish * 10)
    await settle()
    held = client.held
    world.committers.release()
    for _ in range(5):
        await settle()
    assert held >= 9 * (len(publish) - 14 + 64)
    assert client.held == 0


async def test_a_client_without_room_in_the_budget_is_disconnected(
    opened: tuple[WebSocket, FakeClient],
) -> None:
    socket, client = opened
    client.room = 80_000
    socket.received(masked(b"x" * 200_000)[:100_000])
    (close,) = client.frames()
    assert close.opcode is Opcode.CLOSE
    assert int.from_bytes(bytes(close.data[:2]), "big") == 1013
    assert client.is_ended
    assert not socket.is_open


async def test_reading_pauses_while_a_client_has_too_many_publishes_in_progress(
    world: World, opened: tuple[WebSocket, FakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "PUBLISHING_MAX", 3)
    await world.engine.put_topic("x", TopicConfig())
    socket, client = opened
    world.committers.hold()
    publish = {"op": "publish", "topic": "x", "records": [{"data": 1}]}
    socket.received(b"".join(masked(publish | {"request_id": number}) for number in range(10)))
    await settle()
    assert client.is_paused
    assert client.messages() == []
    world.committers.release()
    for _ in range(5):
        await settle()
    acks = client.messages()
    assert [ack["request_id"] for ack in acks] == list(range(10))
    assert not client.is_paused


async def test_many_immediately_completed_publishes_do_not_recurse(
    world: World, opened: tuple[WebSocket, FakeClient]
) -> None:
    await world.engine.put_topic("x", TopicConfig(durability="ephemeral"))  # type: ignore[arg-type]
    socket, client = opened
    publish = masked({"op": "publish", "topic": "x", "records": [{"data": 1}], "return_seqs": False})
    socket.received(publish * 5000)
    for _ in range(10):
        await settle()
    assert len([message for message in client.messages() if message["op"] == "ack"]) == 5000


async def test_publishes_keep_their_order_whether_or_not_they_have_a_key(
    world: World, opened: tuple[WebSocket, FakeClient]
) -> None:
    socket, client = opened
    world.committers.hold()
    for number in range(40):
        key = {"idempotency_key": f"k{number}"} if number % 3 == 1 else {}
        publish = {"op": "publish", "topic": "new", "records": [{"data": number}], "request_id": number}
        socket.received(masked(publish | key))
        if number == 10:
            await settle()
            world.committers.release()
        elif number > 10:
            await asyncio.sleep(0)  # some come when the topic is there, and those before still have no place
    for _ in range(20):
        await settle()
    acks = client.messages()
    assert {ack["request_id"]: ack["first_seq"] for ack in acks} == {n: n + 1 for n in range(40)}


async def test_publishes_in_progress_are_answered_before_the_shutdown(
    world: World, opened: tuple[WebSocket, FakeClient]
) -> None:
    await world.engine.put_topic("x", TopicConfig())
    socket, client = opened
    world.committers.hold()
    publish = {"op": "publish", "topic": "x", "records": [{"data": 1}], "request_id": 1}
    socket.received(masked(publish))
    socket.shut_down()
    assert not client.is_ended
    socket.received(masked(publish | {"request_id": 2}))
    world.committers.release()
    await settle()
    said, refused, acked = client.messages()[:3]
    assert (said["op"], said["code"]) == ("error", "server_shutting_down")
    assert (refused["code"], refused["request_id"]) == ("shutting_down", 2)
    assert (acked["op"], acked["request_id"]) == ("ack", 1)
    assert client.is_ended


async def test_nothing_is_sent_after_the_client_closes(
    world: World, opened: tuple[WebSocket, FakeClient]
) -> None:
    socket, client = opened
    await world.engine.write("x", recs(1))
    socket.received(masked({"op": "subscribe", "topic": "x"}) + masked(b"\x03\xe8", Opcode.CLOSE))
    await settle()
    opcodes = [frame.opcode for frame in client.frames()]
    assert opcodes[-1] is Opcode.CLOSE
    assert client.is_ended
    assert not socket.is_open


async def test_a_frame_without_a_mask_ends_the_connection(opened: tuple[WebSocket, FakeClient]) -> None:
    socket, client = opened
    socket.received(b"\x81\x02{}")
    (close,) = client.frames()
    assert int.from_bytes(bytes(close.data[:2]), "big") == 1002
    assert client.is_ended


def test_a_message_of_128_levels_is_read_and_one_of_129_is_refused() -> None:
    def message(levels: int) -> bytes:
        inner = b"[" * (levels - 1) + b"]" * (levels - 1)
        return b'{"op":"subscribe","topic":"t","request_id":%b}' % inner

    assert bytes(read_command(message(128)).request_id) == b"[" * 127 + b"]" * 127
    with pytest.raises(InvalidMessage, match="more than 128 levels"):
        read_command(message(129))


@pytest.mark.parametrize("number", [b"1e999", b"1" * 1001])
def test_a_message_with_a_number_that_decoders_reject_is_refused(number: bytes) -> None:
    with pytest.raises(InvalidMessage, match="has a number") as caught:
        read_command(b'{"op":"subscribe","topic":"t","request_id":%b}' % number)
    assert caught.value.request_id == b"null"
