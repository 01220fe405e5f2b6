"""§8.3: the WebSocket endpoint."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from tests.contract.raw_http import connect, request_bytes
from tests.contract.socket_client import Socket, opened
from tests.contract.topics_server import Api, Server, fresh_name, serving

NODES = {"Upgrade": "websocket", "Connection": "Upgrade"}
KEY = base64.b64encode(b"0123456789abcdef").decode()


@pytest.fixture
async def socket(server: Server) -> AsyncIterator[Socket]:
    async with opened(server) as connection:
        yield connection


# ---- opening ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Upgrade": "h2c", "Connection": "Upgrade", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": KEY},
        {"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": KEY},
        {**NODES, "Sec-WebSocket-Version": "8", "Sec-WebSocket-Key": KEY},
        {**NODES, "Sec-WebSocket-Version": "13"},
        {**NODES, "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "short"},
        {**NODES, "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "not base64 at all!!"},
    ],
)
def test_an_invalid_handshake_is_refused_and_the_connection_stays_open(
    server: Server, headers: dict[str, str]
) -> None:
    with connect(server) as raw:
        raw.send(request_bytes("GET", "/v0/ws", headers=headers))
        reply = raw.reply()
        assert (reply.status, reply.error()["code"]) == (400, "invalid_request")
        raw.send(request_bytes("GET", "/v0/health"))
        assert raw.reply().status == 200


def test_there_is_no_websocket_over_http2(server: Server) -> None:
    assert server.api("h2").client.get("/v0/ws").status_code == 400


def test_the_handshake_is_the_one_of_the_rfc_and_frames_may_come_with_it(server: Server) -> None:
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    headers = {**NODES, "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key}
    text = b'{"op":"ping","request_id":7}'
    mask = b"\1\2\3\4"
    masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(text))
    with connect(server) as raw:
        frame = bytes([0x81, 0x80 | len(text)]) + mask + masked
        raw.send(request_bytes("GET", "/v0/ws", headers=headers) + frame)
        assert raw.status_line() == 101
        found = raw._headers()
        assert found["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        assert found["upgrade"].lower() == "websocket"
        assert found["connection"].lower() == "upgrade"
        assert "content-length" not in found
        assert "transfer-encoding" not in found
        head = raw._file.read(2)
        assert json.loads(raw._file.read(head[1])) == {"op": "pong", "request_id": 7}


# ---- commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [1, "a", None, {"x": [1]}, True, 1.5])
async def test_the_id_of_a_request_may_be_any_json_and_is_returned(
    socket: Socket, request_id: object
) -> None:
    assert await socket.ask(op="ping", request_id=request_id) == {"op": "pong", "request_id": request_id}


async def test_a_missing_id_is_returned_as_null(socket: Socket) -> None:
    assert await socket.ask(op="ping") == {"op": "pong", "request_id": None}


@pytest.mark.parametrize(
    ("message", "code", "request_id"),
    [
        ("{", "invalid_json", None),
        ("", "invalid_json", None),
        ("[]", "invalid_json", None),
        ('"ping"', "invalid_json", None),
        ("{}", "invalid_json", None),
        ('{"op":"dance","request_id":1}', "invalid_json", 1),
        ('{"op":1,"request_id":1}', "invalid_json", 1),
        ('{"op":"publish","request_id":2,"topic":"x"}', "invalid_json", 2),
        ('{"op":"publish","request_id":2,"records":[]}', "invalid_json", 2),
        ('{"op":"publish","request_id":2,"topic":"x","records":[]}', "invalid_request", 2),
        ('{"op":"publish","request_id":2,"topic":"bad name","records":[{"data":1}]}', "invalid_request", 2),
        ('{"op":"subscribe","request_id":3}', "invalid_json", 3),
        ('{"op":"subscribe","request_id":3,"topic":null,"tail":true}', "invalid_json", 3),
        ('{"op":"subscribe","request_id":3,"topics":{}}', "invalid_request", 3),
        ('{"op":"subscribe","request_id":3,"topic":"x","from_seq":-1}', "invalid_request", 3),
        ('{"op":"subscribe","request_id":3,"topic":"never-made"}', "topic_not_found", 3),
        ('{"op":"subscribe","request_id":3,"topics":{"x":1}}', "invalid_request", 3),
        ("[" * 5000, "invalid_json", None),
    ],
)
async def test_an_invalid_message_is_answered_and_the_connection_stays_open(
    socket: Socket, message: str, code: str, request_id: object
) -> None:
    await socket.raw.send(message)
    answer = await socket.next()
    assert answer.keys() == {"op", "request_id", "code", "message"}
    assert (answer["op"], answer["code"], answer["request_id"]) == ("error", code, request_id)
    assert await socket.ask(op="ping", request_id="still") == {"op": "pong", "request_id": "still"}


async def test_a_prefix_cannot_be_subscribed_to_and_the_error_names_the_alternative(socket: Socket) -> None:
    for asked in ({"topic": "x*"}, {"topics": {"x*": {}}}, {"topic": "x*", "lenient": True}):
        answer = await socket.ask(op="subscribe", request_id=1, **asked)
        assert (answer["op"], answer["code"]) == ("error", "invalid_request")
        assert "/v0/watch" in answer["message"]


async def test_binary_frames_are_not_supported(socket: Socket) -> None:
    await socket.raw.send(b'{"op":"ping"}')
    answer = await socket.next()
    assert (answer["op"], answer["code"], answer["request_id"]) == ("error", "unsupported_message", None)
    assert (await socket.ask(op="ping"))["op"] == "pong"


async def test_text_that_is_not_utf8_ends_the_connection(socket: Socket) -> None:
    await socket.raw.send(b'{"op":"ping","request_id":"\xff"}', text=True)
    assert await socket.is_closed() == 1007


async def test_a_message_in_many_frames_is_one_message(socket: Socket) -> None:
    await socket.raw.send(iter(['{"op":', '"ping",', '"request_id"', ":[1,2]}"]))
    assert await socket.next() == {"op": "pong", "request_id": [1, 2]}


async def test_a_message_that_is_too_large_ends_the_connection(socket: Socket) -> None:
    with contextlib.suppress(websockets.ConnectionClosed):
        await socket.raw.send("x" * (17 * 1024**2))
    assert await socket.is_closed() == 1009


async def test_pings_of_the_protocol_are_answered(socket: Socket) -> None:
    waiting = await socket.raw.ping()
    assert await asyncio.wait_for(waiting, 5) >= 0


# ---- publishing -------------------------------------------------------------------------------------------


async def test_a_publish_is_acknowledged_like_a_write(socket: Socket, topic: str) -> None:
    ack = await socket.publish(topic, 1, 2, request_id="p1")
    performance = ack.pop("performance")
    assert ack == {
        "op": "ack",
        "request_id": "p1",
        "topic": topic,
        "first_seq": 1,
        "last_seq": 2,
        "seqs": [1, 2],
        "head_seq": 2,
        "count": 2,
        "created": True,
        "deduped": False,
    }
    assert performance["server_total_ms"] >= 0
    assert {"wal_append_ms", "fsync_ms"} <= performance.keys()
    again = await socket.publish(topic, 3, return_seqs=False)
    assert (again["seqs"], again["created"], again["first_seq"]) == (None, False, 3)


async def test_the_parts_of_a_publish_are_those_of_a_write(socket: Socket, h1: Api, topic: str) -> None:
    first = await socket.publish(topic, 1, idempotency_key="k", node="n", config={"cap_records": 5})
    again = await socket.publish(topic, 1, idempotency_key="k")
    assert (first["deduped"], again["deduped"], again["seqs"]) == (False, True, [1])
    assert h1.state(topic)["config"]["cap_records"] == 5
    assert h1.diff(topic)["records"][0]["$node"] == "n"
    refused = await socket.refused(
        op="publish", topic=fresh_name(), records=[{"data": 1}], create=False, request_id=4
    )
    assert (refused["code"], refused["request_id"]) == ("topic_not_found", 4)
    too_much = await socket.refused(op="publish", topic=topic, records=[{"data": 0}] * 10_001)
    assert too_much["code"] == "batch_too_large"


@pytest.mark.parametrize("config", [{}, {"durability": "ephemeral"}, {"durable": True}])
async def test_publishes_of_one_client_stay_in_order_even_if_the_first_creates_the_topic(
    socket: Socket, h1: Api, topic: str, config: dict[str, object]
) -> None:
    for number in range(500):
        keyed = {"idempotency_key": f"k{number}"} if number % 7 == 3 else {}
        records = [{"data": number}]
        await socket.send(
            op="publish", topic=topic, records=records, request_id=number, config=config, **keyed
        )
    acks = [await socket.next() for _ in range(500)]
    assert {ack["op"] for ack in acks} == {"ack"}
    assert {ack["request_id"]: ack["first_seq"] - 1 for ack in acks} == {n: n for n in range(500)}
    data = h1.data_of(topic, limit=1000)
    assert data == list(range(500))


# ---- following --------------------------------------------------------------------------------------------


async def test_subscribed_then_backlog_then_caught_up_then_live(socket: Socket, h1: Api, topic: str) -> None:
    h1.write(topic, 1, 2)
    await socket.send(op="subscribe", topic=topic, request_id=1)
    assert await socket.next() == {
        "op": "subscribed",
        "request_id": 1,
        "topics": {topic: {"from_seq": 0, "head_seq": 2, "earliest_seq": 1}},
    }
    record = await socket.next()
    assert (record["op"], record["topic"]) == ("record", topic)
    assert (record["from_seq"], record["to_seq"], record["head_seq"]) == (0, 2, 2)
    assert [one["data"] for one in record["records"]] == [1, 2]
    assert await socket.next() == {"op": "caught_up", "topic": topic, "head_seq": 2}
    h1.write(topic, 3)
    assert [one["$seq"] for one in (await socket.next())["records"]] == [3]
    assert (await socket.next())["op"] == "caught_up"


async def test_an_empty_tail_is_caught_up_immediately(socket: Socket, h1: Api, topic: str) -> None:
    h1.write(topic, 1)
    await socket.send(op="subscribe", topic=topic, tail=True)
    assert (await socket.next())["topics"][topic]["from_seq"] == 1
    assert await socket.next() == {"op": "caught_up", "topic": topic, "head_seq": 1}


async def test_an_entry_of_the_map_wins_and_lenient_skips_missing_topics(socket: Socket, h1: Api) -> None:
    first, second = fresh_name(), fresh_name()
    h1.write(first, 1, 2)
    h1.write(second, 1, 2)
    answer = await socket.subscribe(
        topic=first, topics={first: {"from_seq": 1}, second: {"tail": True}, "nope": {}}, lenient=True
    )
    assert {name: place["from_seq"] for name, place in answer["topics"].items()} == {first: 1, second: 2}


async def test_subscribing_again_starts_over_at_the_new_position(socket: Socket, h1: Api, topic: str) -> None:
    h1.write(topic, 1, 2, 3)
    await socket.send(op="subscribe", topic=topic)
    assert [message["op"] for message in [await socket.next() for _ in range(3)]] == [
        "subscribed",
        "record",
        "caught_up",
    ]
    await socket.send(op="subscribe", topic=topic, from_seq=2)
    assert (await socket.next())["op"] == "subscribed"
    assert [one["$seq"] for one in (await socket.next())["records"]] == [3]


async def test_nothing_comes_after_unsubscribed(socket: Socket, h1: Api, topic: str) -> None:
    other = fresh_name()
    for name in (topic, other):
        h1.write(name, 1)
    await socket.subscribe(topics={topic: {"tail": True}, other: {"tail": True}})
    answer = await socket.ask(op="unsubscribe", topic=topic, topics=[other, "never"], request_id=9)
    assert answer == {"op": "unsubscribed", "request_id": 9, "topics": [topic, other, "never"]}
    h1.write(topic, 2)
    h1.write(other, 2)
    assert (await socket.ask(op="ping"))["op"] == "pong"
    await socket.send(op="ping", request_id="last")
    assert await socket.next() == {"op": "pong", "request_id": "last"}


async def test_own_records_are_skipped_and_fields_are_as_requested(
    socket: Socket, h1: Api, topic: str
) -> None:
    h1.write_records(
        topic, [{"data": 1, "tag": "t", "meta": {"m": 1}, "node": "a"}, {"data": 2, "node": "me"}]
    )
    await socket.send(op="subscribe", topic=topic, node="me", include_tags=True, include_meta=False)
    assert (await socket.next())["op"] == "subscribed"
    (record,) = (await socket.next())["records"]
    assert record == {"$seq": 1, "$ts": record["$ts"], "$node": "a", "$tag": "t", "data": 1}
    await socket.send(op="subscribe", topic=topic, include_data=False)
    while (message := await socket.next())["op"] != "record":
        pass
    assert all("data" not in record for record in message["records"])


async def test_a_gap_is_reported_with_its_reason(socket: Socket, h1: Api, topic: str) -> None:
    h1.put(topic, cap_records=2)
    h1.write(topic, *range(5))
    await socket.send(op="subscribe", topic=topic)
    assert (await socket.next())["op"] == "subscribed"
    assert await socket.next() == {
        "op": "tombstone",
        "topic": topic,
        "reason": "cap",
        "gap_from": 1,
        "gap_to": 3,
        "earliest_seq": 4,
        "head_seq": 5,
    }
    assert [one["$seq"] for one in (await socket.next())["records"]] == [4, 5]


async def test_a_deleted_topic_is_reported_and_can_be_subscribed_to_again(
    socket: Socket, h1: Api, topic: str
) -> None:
    h1.write(topic, 1)
    await socket.subscribe(topic=topic, tail=True)
    assert (await socket.next())["op"] == "caught_up"
    h1.remove(topic)
    assert await socket.next() == {
        "op": "topic_deleted",
        "topic": topic,
        "head_seq": 0,
        "reason": "deleted",
    }
    h1.write(topic, "new")
    await socket.subscribe(topic=topic)
    assert [one["data"] for one in (await socket.next())["records"]] == ["new"]


async def test_a_client_receives_its_own_publishes(socket: Socket, h1: Api, topic: str) -> None:
    h1.put(topic)
    await socket.subscribe(topic=topic, tail=True)
    assert (await socket.next())["op"] == "caught_up"
    await socket.send(op="publish", topic=topic, records=[{"data": "hello"}], request_id=1)
    ops = {(message := await socket.next())["op"]: message for _ in range(2)}
    assert ops.keys() == {"ack", "record"}
    assert ops["record"]["records"][0]["data"] == "hello"


# ---- keys -------------------------------------------------------------------------------------------------


async def test_every_command_is_checked_against_the_key(tmp_path: Path) -> None:
    keys = "all,reader:r:a.|b.,writer:w,nothing:d"
    with serving(tmp_path / "data", key="all", TOPICS_API_KEYS=keys) as server:
        api = server.api(key="all")
        api.write("a.x", 1)
        api.write("c.x", 1)
        assert server.api().client.get("/v0/ws").status_code == 401
        async with opened(server, "reader") as reader:
            await reader.subscribe(topic="a.x")
            assert (await reader.refused(op="subscribe", topic="c.x"))["code"] == "forbidden"
            refused = await reader.refused(op="publish", topic="a.x", records=[{"data": 1}], request_id=5)
            assert (refused["code"], refused["request_id"]) == ("forbidden", 5)
            assert (await reader.ask(op="unsubscribe", topic="c.x"))["op"] == "unsubscribed"
        async with opened(server, "writer") as writer:
            await writer.publish("a.x", 2)
            assert (await writer.refused(op="subscribe", topic="a.x"))["code"] == "forbidden"
            with_config: dict[str, Any] = {"topic": "a.x", "records": [{"data": 1}], "config": {}}
            assert (await writer.refused(op="publish", **with_config))["code"] == "forbidden"
        async with opened(server, "nothing") as nobody:
            assert (await nobody.ask(op="ping"))["op"] == "pong"


async def test_connections_are_capped_before_the_upgrade_and_counted(tmp_path: Path) -> None:
    with serving(tmp_path / "data", TOPICS_MAX_SSE_CONNECTIONS="2") as server:
        api = server.api()
        async with opened(server), opened(server):
            with connect(server) as raw:
                headers = {**NODES, "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": KEY}
                raw.send(request_bytes("GET", "/v0/ws", headers=headers))
                assert raw.reply().error()["code"] == "throttled"
            metrics = api.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()
            assert metrics["sse_connections"] == 2
        for _ in range(500):
            if not _connections(api):
                break
            await asyncio.sleep(0.01)
        async with opened(server) as again:
            assert (await again.ask(op="ping"))["op"] == "pong"


def _connections(api: Api) -> int:
    metrics = api.client.get("/v0/metrics", headers={"Accept": "application/json"}).json()
    return int(metrics["sse_connections"])


# ---- shutdown ---------------------------------------------------------------------------------------------


async def test_a_server_that_stops_reports_it_and_answers_publishes_in_progress(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        async with opened(server) as socket:
            await socket.publish("x", 1)
            stopping = asyncio.create_task(asyncio.to_thread(server.stop))
            answer = await socket.next()
            assert (answer["op"], answer["code"]) == ("error", "server_shutting_down")
            assert answer["request_id"] is None
            assert await socket.is_closed() == 1001
        assert await stopping == 0
