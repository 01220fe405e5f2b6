"""§4: writes, their responses, the order of their checks, idempotency and retention."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest
from tests.contract.topics_server import PROTOCOLS, Api, Server

MIB = 1024**2


def test_a_write_returns_where_its_records_are(api: Api, topic: str) -> None:
    answer = api.write(topic, "a", "b")
    assert answer.keys() == {
        "topic",
        "first_seq",
        "last_seq",
        "seqs",
        "head_seq",
        "count",
        "created",
        "deduped",
        "performance",
    }
    assert (answer["topic"], answer["first_seq"], answer["last_seq"]) == (topic, 1, 2)
    assert (answer["seqs"], answer["head_seq"], answer["count"]) == ([1, 2], 2, 2)
    assert (answer["created"], answer["deduped"]) == (True, False)
    again = api.write(topic, "c")
    assert (again["created"], again["seqs"], again["head_seq"], again["count"]) == (False, [3], 3, 1)


def test_only_the_query_leaves_the_seqs_out(api: Api, topic: str) -> None:
    body = {"records": [{"data": 1}], "return_seqs": False}
    assert api.ask("POST", f"/v0/topics/{topic}", body, status=201)["seqs"] == [1]
    answer = api.ask("POST", f"/v0/topics/{topic}?return_seqs=false", {**body, "return_seqs": True})
    assert "seqs" not in answer
    assert (answer["first_seq"], answer["last_seq"], answer["count"]) == (2, 2, 1)


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
def test_a_write_reports_its_append_time_and_a_sync_time_only_if_it_waited(
    api: Api, topic: str, durability: str
) -> None:
    api.put(topic, durability=durability)
    for _ in range(3):
        performance = api.write(topic, 1)["performance"]
        assert performance["wal_append_ms"] >= 0
        if durability == "fsync":
            assert performance["fsync_ms"] > 0
        else:
            assert performance["fsync_ms"] == 0.0


def test_a_record_keeps_its_node_over_that_of_its_batch(api: Api, topic: str) -> None:
    api.write_records(
        topic, [{"data": 1, "node": "mine"}, {"data": 2}, {"data": 3, "node": None}], node="ours"
    )
    assert [record["$node"] for record in api.diff(topic)["records"]] == ["mine", "ours", "ours"]


@pytest.mark.parametrize("meta", [{"a": 1}, {}, [1, 2], "text", 7, False])
def test_meta_may_be_any_json_but_null(api: Api, topic: str, meta: object) -> None:
    api.write_records(topic, [{"data": 1, "meta": meta}])
    assert api.diff(topic)["records"][0]["meta"] == meta


# --- creating ----------------------------------------------------------------------------------------------


def test_a_write_creates_the_topic_it_needs_with_its_inline_config(api: Api, topic: str) -> None:
    answer = api.write(topic, 1, config={"ttl_ms": 60_000, "type": "queue"})
    assert answer["created"] is True
    config = api.state(topic)["config"]
    assert (config["ttl_ms"], config["type"]) == (60_000, "queue")


def test_the_inline_config_is_not_used_on_an_existing_topic(api: Api, topic: str) -> None:
    api.put(topic, ttl_ms=60_000)
    answer = api.write(topic, 1, config={"ttl_ms": 5, "type": "queue", "auto_create": False})
    assert answer["created"] is False
    assert api.state(topic)["config"]["ttl_ms"] == 60_000


@pytest.mark.parametrize(
    ("fields", "created"),
    [
        ({}, True),
        ({"create": None}, True),
        ({"create": True}, True),
        ({"create": False}, False),
        ({"config": {}}, True),
        ({"config": {"auto_create": False}}, False),
        ({"config": {"auto_create": False}, "create": True}, True),
        ({"config": {"auto_create": True}, "create": False}, False),
        ({"config": {"auto_create": False}, "create": None}, False),
    ],
)
def test_create_overrides_the_inline_auto_create(
    api: Api, topic: str, fields: dict[str, Any], created: bool
) -> None:
    if created:
        assert api.write(topic, 1, **fields)["created"] is True
    else:
        error = api.write(topic, 1, status=404, **fields)["error"]
        assert (error["code"], error["detail"]) == ("topic_not_found", {"topic": topic})
        api.state(topic, status=404)


@pytest.mark.parametrize("config", [{"ttl_ms": -1}, {"durability": "x"}, {"dead_letter": "a b"}, [], 1])
def test_a_bad_inline_config_creates_nothing(api: Api, topic: str, config: object) -> None:
    assert api.write(topic, 1, config=config, status=400)["error"]["code"] == "invalid_request"
    api.state(topic, status=404)


async def test_of_many_first_writes_exactly_one_creates(server: Server, topic: str) -> None:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=40) as client:
        body = {"records": [{"data": 1}]}
        answers = await asyncio.gather(*(client.post(f"/v0/topics/{topic}", json=body) for _ in range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 19 + [201]
    assert sorted(answer.json()["first_seq"] for answer in answers) == list(range(1, 21))
    assert sum(answer.json()["created"] for answer in answers) == 1


# --- order of checks ---------------------------------------------------------------------------------------


def test_checks_come_in_their_order(api: Api, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    long_tag = {"data": 1, "tag": "x" * 257}
    huge = {"data": "x" * MIB}
    many = [long_tag] * 10_001
    # The content type comes before JSON.
    assert api.refused("POST", path, status=415, content=b"{")["code"] == "unsupported_media_type"
    # JSON and its types come before limits.
    body: dict[str, Any] = {"records": many, "create": 1}
    assert api.refused("POST", path, body, status=400)["code"] == "invalid_request"
    # The batch comes before its records.
    assert api.refused("POST", path, {"records": many}, status=400)["code"] == "batch_too_large"
    # Records come before the topic.
    body = {"records": [huge], "create": False}
    assert api.refused("POST", path, body, status=400)["code"] == "record_too_large"
    assert (
        api.refused("POST", "/v0/topics/a%20b", {"records": [huge]}, status=400)["code"] == "record_too_large"
    )
    # Not found comes before a bad name.
    body = {"records": [{"data": 1}], "create": False}
    assert api.refused("POST", "/v0/topics/a%20b", body, status=404)["code"] == "topic_not_found"
    assert api.refused("POST", "/v0/topics/a%20b", {"records": [{"data": 1}]}, status=400)["code"] == (
        "invalid_request"
    )


def test_a_repeated_write_is_recognised_before_the_topic_is_found_full(api: Api, topic: str) -> None:
    api.put(topic, cap_records=1, discard="reject")
    api.write(topic, 1, idempotency_key="k")
    assert api.write(topic, 2, status=422)["error"]["code"] == "topic_full"
    assert api.write(topic, 1, idempotency_key="k")["deduped"] is True
    assert api.write(topic, 1, 2, idempotency_key="k")["deduped"] is True


def test_a_write_too_large_for_a_rejecting_topic_is_reported_before_topic_full(api: Api, topic: str) -> None:
    api.put(topic, cap_records=2, cap_bytes=10, discard="reject")
    api.write(topic, 1)
    for data in ([1, 2, 3], ["x" * 9]):
        body = {"records": [{"data": one} for one in data]}
        error = api.refused("POST", f"/v0/topics/{topic}", body, status=400)
        assert error["code"] == "record_too_large"
    assert api.write(topic, 1, 2, status=422)["error"]["code"] == "topic_full"


def test_room_is_made_by_expiry_before_a_full_topic_refuses(api: Api, topic: str) -> None:
    api.put(topic, cap_records=1, discard="reject", ttl_ms=20)
    api.write(topic, 1)
    time.sleep(0.06)
    assert api.write(topic, 2)["seqs"] == [2]


# --- sequences ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
async def test_concurrent_writes_get_dense_sequences_in_array_order_and_times_never_go_back(
    server: Server, h1: Api, topic: str, durability: str
) -> None:
    h1.put(topic, durability=durability)
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=40) as client:

        async def write(writer: int) -> list[tuple[list[int], int]]:
            done = []
            for turn in range(10):
                records = [{"data": [writer, turn, place]} for place in range(3)]
                answer = await client.post(f"/v0/topics/{topic}", json={"records": records})
                done.append((answer.json()["seqs"], turn))
            return done

        per_writer = await asyncio.gather(*(write(writer) for writer in range(8)))
    records = h1.diff(topic, limit=1000)["records"]
    assert [record["$seq"] for record in records] == list(range(1, 241))
    by_seq = {record["$seq"]: record["data"] for record in records}
    for writer, done in enumerate(per_writer):
        for seqs, turn in done:
            assert seqs == list(range(seqs[0], seqs[0] + 3))
            assert [by_seq[seq] for seq in seqs] == [[writer, turn, place] for place in range(3)]
    times = [record["$ts"] for record in records]
    assert times == sorted(times)


def test_a_write_can_be_read_as_soon_as_it_is_answered(api: Api, topic: str) -> None:
    for number in range(1, 30):
        assert api.write(topic, number)["head_seq"] == number
        assert api.seqs_of(topic, from_seq=number - 1) == [number]


def test_a_time_is_that_of_the_write(api: Api, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    api.write(topic, 1)
    after_ms = time.time_ns() // 1_000_000
    assert before_ms <= api.diff(topic)["records"][0]["$ts"] <= after_ms


# --- reject ------------------------------------------------------------------------------------------------


def test_a_full_topic_that_rejects_appends_nothing_and_uses_no_sequence(api: Api, topic: str) -> None:
    api.put(topic, cap_records=3, discard="reject")
    api.write(topic, 1, 2)
    error = api.write(topic, 3, 4, status=422)["error"]
    assert error["code"] == "topic_full"
    assert error["detail"] == {
        "topic": topic,
        "cap_records": 3,
        "cap_bytes": 0,
        "head_seq": 2,
        "earliest_seq": 1,
    }
    assert api.data_of(topic) == [1, 2]
    assert api.write(topic, 3)["seqs"] == [3]
    api.delete(topic, before_seq=2)
    assert api.write(topic, 4)["seqs"] == [4]


def test_the_byte_cap_of_a_topic_that_rejects_is_exact(api: Api, topic: str) -> None:
    api.put(topic, cap_bytes=10, discard="reject")
    api.write(topic, "xxx", "xxx")
    assert api.write(topic, 1, status=422)["error"]["code"] == "topic_full"
    api.delete(topic, before_seq=2)
    api.write(topic, 12345)
    assert api.state(topic)["bytes"] == 10


async def test_concurrent_writes_never_overfill_a_topic_that_rejects(
    server: Server, h1: Api, topic: str
) -> None:
    h1.put(topic, cap_records=10, discard="reject", durability="fsync")
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=40) as client:
        body = {"records": [{"data": 1}, {"data": 2}, {"data": 3}]}
        answers = await asyncio.gather(*(client.post(f"/v0/topics/{topic}", json=body) for _ in range(12)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [422] * 9
    assert h1.seqs_of(topic) == list(range(1, 10))


def test_a_topic_that_rejects_is_never_cap_evicted(api: Api, topic: str) -> None:
    api.write(topic, 1, 2, 3, 4, 5)
    api.put(topic, cap_records=2, cap_bytes=2, discard="reject", status=200)
    page = api.diff(topic)
    assert ([record["data"] for record in page["records"]], page["tombstone"]) == ([1, 2, 3, 4, 5], None)
    assert api.write(topic, 6, status=422)["error"]["code"] == "topic_full"


# --- retention ---------------------------------------------------------------------------------------------


def test_the_cap_counts_live_records_and_not_holes(api: Api, topic: str) -> None:
    api.put(topic, cap_records=3)
    api.write_records(topic, [{"data": n, "tag": "even" if n % 2 == 0 else "odd"} for n in (1, 2, 3)])
    api.delete(topic, match="even")
    api.write(topic, 4)
    page = api.diff(topic)
    assert ([record["$seq"] for record in page["records"]], page["tombstone"]) == ([1, 3, 4], None)
    api.write(topic, 5)
    page = api.diff(topic)
    assert [record["$seq"] for record in page["records"]] == [3, 4, 5]
    assert page["tombstone"]["reason"] == "cap"


def test_the_byte_cap_evicts_the_oldest_until_the_rest_fits(api: Api, topic: str) -> None:
    api.put(topic, cap_bytes=10)
    api.write(topic, "xx", "yy", "zz")
    state = api.state(topic)
    assert (state["count"], state["bytes"], state["earliest_seq"]) == (2, 8, 2)


def test_one_record_larger_than_the_byte_cap_leaves_the_topic_empty(api: Api, topic: str) -> None:
    api.put(topic, cap_bytes=10)
    api.write(topic, 1)
    answer = api.write(topic, "x" * 20)
    assert (answer["seqs"], answer["head_seq"]) == ([2], 2)
    state = api.state(topic)
    assert (state["count"], state["bytes"], state["head_seq"], state["earliest_seq"]) == (0, 0, 2, 3)
    page = api.diff(topic)
    assert (page["records"], page["next_from_seq"], page["caught_up"]) == ([], 2, True)
    assert page["tombstone"]["reason"] == "cap"


def test_whichever_cap_is_hit_first_counts(api: Api, topic: str) -> None:
    api.put(topic, cap_records=3, cap_bytes=100)
    api.write(topic, 1, 2, 3, 4)
    assert api.state(topic)["count"] == 3
    api.write(topic, "x" * 97)
    assert api.state(topic)["bytes"] <= 100
    assert api.seqs_of(topic) == [4, 5]


def test_a_write_larger_than_the_cap_keeps_its_newest_records(api: Api, topic: str) -> None:
    api.put(topic, cap_records=2)
    assert api.write(topic, 1, 2, 3, 4, 5)["seqs"] == [1, 2, 3, 4, 5]
    assert api.data_of(topic) == [4, 5]


@pytest.mark.parametrize("look", ["state", "diff", "list", "delete"])
def test_expired_records_are_gone_in_every_read(api: Api, topic: str, look: str) -> None:
    api.put(topic, ttl_ms=20)
    api.write(topic, 1, 2)
    time.sleep(0.06)
    if look == "state":
        assert api.state(topic)["count"] == 0
    elif look == "diff":
        assert api.diff(topic)["records"] == []
    elif look == "list":
        assert api.ask("GET", "/v0/topics", params={"prefix": topic})["topics"][0]["count"] == 0
    else:
        assert api.delete(topic, before_seq=3)["deleted"] == 0
    assert api.state(topic)["earliest_seq"] == 3


# --- idempotency -------------------------------------------------------------------------------------------


def test_a_repeated_write_gets_the_first_outcome(api: Api, topic: str) -> None:
    first = api.write(topic, 1, 2, idempotency_key="k")
    api.write(topic, 3)
    again = api.write(topic, "something", "else", "entirely", idempotency_key="k", config={"ttl_ms": 1})
    assert (again["seqs"], again["first_seq"], again["last_seq"]) == ([1, 2], 1, 2)
    assert (again["head_seq"], again["count"]) == (first["head_seq"], 2) == (2, 2)
    assert (again["created"], again["deduped"]) == (False, True)
    assert api.data_of(topic) == [1, 2, 3]


def test_the_header_is_used_only_if_the_body_has_no_key(api: Api, topic: str) -> None:
    def write(header: str, **fields: object) -> Any:
        headers = {"Content-Type": "application/json", "Idempotency-Key": header}
        body = json.dumps({"records": [{"data": 1}], **fields}).encode()
        return api.client.post(f"/v0/topics/{topic}", content=body, headers=headers).json()

    assert write("a")["deduped"] is False
    assert write("a")["deduped"] is True
    assert write("a", idempotency_key="b")["deduped"] is False
    assert write("c", idempotency_key="b")["deduped"] is True
    assert write("a", idempotency_key=None)["deduped"] is True


def test_keys_are_those_of_one_topic(api: Api, topic: str) -> None:
    api.write(topic, 1, idempotency_key="k")
    assert api.write(f"{topic}.other", 1, idempotency_key="k")["deduped"] is False
    assert api.write(topic, 1, idempotency_key="K")["deduped"] is False


def test_a_key_lives_as_long_as_its_window(api: Api, topic: str) -> None:
    api.put(topic, idempotency_window_ms=150)
    api.write(topic, 1, idempotency_key="k")
    assert api.write(topic, 1, idempotency_key="k")["deduped"] is True
    time.sleep(0.2)
    answer = api.write(topic, 1, idempotency_key="k")
    assert (answer["deduped"], answer["seqs"]) == (False, [2])


def test_a_refused_write_stores_no_key(api: Api, topic: str) -> None:
    api.put(topic, cap_records=1, discard="reject")
    api.write(topic, 1)
    api.write(topic, 2, idempotency_key="k", status=422)
    api.delete(topic, before_seq=2)
    answer = api.write(topic, 2, idempotency_key="k")
    assert (answer["deduped"], answer["seqs"]) == (False, [2])


def test_a_deduped_write_is_not_undone_by_deletes(api: Api, topic: str) -> None:
    api.write(topic, 1, idempotency_key="k")
    api.delete(topic, before_seq=2)
    answer = api.write(topic, 1, idempotency_key="k")
    assert (answer["deduped"], answer["seqs"]) == (True, [1])
    assert api.state(topic)["count"] == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_of_concurrent_writes_with_one_key_one_appends(
    server: Server, h1: Api, topic: str, protocol: str
) -> None:
    options: dict[str, Any] = {"http1": protocol == "h1", "http2": protocol == "h2"}
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=40, **options) as client:
        body = {"records": [{"data": 1}, {"data": 2}], "idempotency_key": "k", "config": {"durable": True}}
        answers = await asyncio.gather(*(client.post(f"/v0/topics/{topic}", json=body) for _ in range(20)))
    bodies = [answer.json() for answer in answers]
    assert sum(not body["deduped"] for body in bodies) == 1
    assert {tuple(body["seqs"]) for body in bodies} == {(1, 2)}
    # Another write may append between the creation and the creator's own append, which is then the repeat.
    for answer in answers:
        fresh_creation = answer.json()["created"] and not answer.json()["deduped"]
        assert answer.status_code == (201 if fresh_creation else 200)
    assert h1.data_of(topic) == [1, 2]
