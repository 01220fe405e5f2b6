"""§8.1 and §8.2: watches over server-sent events, on both protocols."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.event_stream import Watcher, read_id
from tests.contract.topics_server import PROTOCOLS, Server, fresh_name, serving

FROM_START: dict[str, object] = {}


@pytest.fixture(params=PROTOCOLS)
def watcher(request: pytest.FixtureRequest, server: Server) -> Watcher:
    return Watcher(server, request.param)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    """A server with heartbeats as short as a test needs."""
    with serving(tmp_path_factory.mktemp("quick") / "data", TOPICS_TEST_MIN_HEARTBEAT_MS="20") as running:
        yield running


# ---- creating ---------------------------------------------------------------------------------------------


async def test_a_watch_returns_its_id_and_the_position_of_each_topic(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1, 2, 3)
    tail = fresh_name()
    await watcher.write(tail, 1, 2)
    created = await watcher.create({topic: {"from_seq": 1}, tail: {"tail": True}})
    assert re.fullmatch(r"wid_[A-Za-z0-9_-]{22}", created["wid"])
    assert created["stream_url"] == f"/v0/watch/{created['wid']}"
    assert created["session_ttl_ms"] == 300_000
    assert created["topics"] == {
        topic: {"from_seq": 1, "head_seq": 3, "earliest_seq": 1},
        tail: {"from_seq": 2, "head_seq": 2, "earliest_seq": 1},
    }
    assert created["performance"]["server_total_ms"] >= 0


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"topics": {}},
        {"topics": {f"t{number}": {} for number in range(257)}},
        {"topics": ["x"]},
        {"topics": {"x": 1}},
        {"topics": {"x": None}},
        {"topics": {"x": {"from_seq": -1}}},
        {"topics": {"x": {"from_seq": 1.5}}},
        {"topics": {"x": {"from_seq": 2**64}}},
        {"topics": {"x": {"tail": 1}}},
        {"topics": {"x": {}}, "consistency": "none"},
        {"topics": {"x": {}}, "heartbeat_ms": "1"},
        {"topics": {"x": {}}, "include_data": 0},
        {"topics": {"x": {}}, "node": 1},
        {"topics": {"x": {}}, "node": "n" * 129},
        {"topics": {"x": {}}, "match": ["data", "Eq", "x"]},
    ],
)
async def test_an_invalid_watch_is_refused(watcher: Watcher, body: object) -> None:
    response = await watcher.post("/v0/watch", body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


async def test_an_unknown_topic_is_refused_unless_the_watch_is_lenient(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1)
    refused = await watcher.post("/v0/watch", {"topics": {topic: {}, "absent": {}}})
    assert refused.status_code == 404
    assert refused.json()["error"]["detail"] == {"topic": "absent"}
    created = await watcher.create({topic: {}, "absent": {}}, query="?lenient=true")
    assert list(created["topics"]) == [topic]


async def test_both_consistencies_are_accepted(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1)
    for consistency in ("eventual", "strong"):
        async with watcher.watch({topic: {}}, consistency=consistency) as stream:
            assert (await stream.next()).seqs == [1]


@pytest.mark.parametrize("durability", ["ephemeral", "memory", "disk", "fsync"])
async def test_a_strong_watch_gets_everything_in_order_as_soon_as_it_is_synced(
    watcher: Watcher, topic: str, durability: str
) -> None:
    await watcher.write(topic, 1, 2, config={"durability": durability})
    async with watcher.watch({topic: {}}, consistency="strong") as stream:
        record, caught_up = await stream.take(2)
        assert (record.name, record.seqs, caught_up.name) == ("record", [1, 2], "caught-up")
        for number in range(3, 23):
            await watcher.write(topic, number)
        seen: list[int] = []
        while len(seen) < 20:
            event = await stream.next()
            if event.name == "record":
                seen += event.seqs
        assert seen == list(range(3, 23))


# ---- the stream -------------------------------------------------------------------------------------------


async def test_backlog_then_caught_up_then_live_records(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, {"n": 1}, {"n": 2})
    async with watcher.watch({topic: {}}) as stream:
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        assert stream.response.headers["cache-control"] == "no-store"
        assert stream.response.headers["x-accel-buffering"] == "no"
        record, caught_up = await stream.take(2)
        assert record.name == "record"
        assert record.seqs == [1, 2]
        assert record.data.keys() == {"topic", "from_seq", "to_seq", "head_seq", "records"}
        assert (record.data["from_seq"], record.data["to_seq"], record.data["head_seq"]) == (0, 2, 2)
        assert record.data["records"][0].keys() == {"$seq", "$ts", "data"}
        assert read_id(record.id) == {topic: 2}
        assert caught_up.name == "caught-up"
        assert caught_up.data == {"topic": topic, "head_seq": 2}
        assert read_id(caught_up.id) == {topic: 2}
        await watcher.write(topic, {"n": 3})
        record, caught_up = await stream.take(2)
        assert (record.name, record.seqs, caught_up.name) == ("record", [3], "caught-up")
        assert record.data["from_seq"] == 2


async def test_the_first_line_sets_the_retry_time_and_json_has_no_blanks(
    watcher: Watcher, topic: str
) -> None:
    await watcher.write(topic, {"a": [1, 2]})
    created = await watcher.create({topic: {}})
    async with (
        watcher.client() as client,
        client.stream("GET", created["stream_url"]) as response,
    ):
        text = ""
        async for piece in response.aiter_text():
            text += piece
            if "caught-up" in text:
                break
    assert text.startswith("retry: 2000\n\nid: ")
    assert '"$seq":1,' in text
    assert '"data":{"a":[1,2]}' in text


async def test_an_empty_topic_is_caught_up_immediately(watcher: Watcher, topic: str) -> None:
    async with watcher.client() as client:
        await client.put(f"/v0/topics/{topic}", json={})
    async with watcher.watch({topic: {}}) as stream:
        event = await stream.next()
        assert (event.name, event.data) == ("caught-up", {"topic": topic, "head_seq": 0})
        await watcher.write(topic, 1)
        assert (await stream.next()).seqs == [1]


async def test_tail_starts_at_the_head(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1, 2)
    async with watcher.watch({topic: {"tail": True}}) as stream:
        assert (await stream.next()).name == "caught-up"
        await watcher.write(topic, 3)
        assert (await stream.next()).seqs == [3]


async def test_a_large_backlog_comes_in_batches_without_a_gap(watcher: Watcher, topic: str) -> None:
    for _ in range(3):
        await watcher.write(topic, *range(500))
    async with watcher.watch({topic: {}}, limit=400) as stream:
        *records, caught_up = await stream.until_caught_up()
        assert [event.name for event in records] == ["record"] * 4
        assert [seq for event in records for seq in event.seqs] == list(range(1, 1501))
        assert all(len(event.seqs) <= 400 for event in records)
        assert [event.data["from_seq"] for event in records[1:]] == [
            event.data["to_seq"] for event in records[:-1]
        ]
        assert caught_up.data["head_seq"] == 1500


async def test_batches_stay_below_their_bytes(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, *["x" * 1000 for _ in range(20)])
    async with watcher.watch({topic: {}}, max_batch_bytes=5000) as stream:
        *records, _ = await stream.until_caught_up()
        assert [len(event.seqs) for event in records] == [4, 4, 4, 4, 4]


async def test_several_topics_are_read_in_the_order_of_their_names(watcher: Watcher) -> None:
    stem = fresh_name()
    names = [f"{stem}-{letter}" for letter in "cab"]
    for name in names:
        await watcher.write(name, 1, 2)
    async with watcher.watch({name: {} for name in names}) as stream:
        events = await stream.take(6)
        assert [(event.name, event.data["topic"]) for event in events] == [
            pair for name in sorted(names) for pair in (("record", name), ("caught-up", name))
        ]
        assert read_id(events[-1].id) == dict.fromkeys(names, 2)
        await watcher.write(names[0], 3)
        record = await stream.next()
        assert read_id(record.id) == {**dict.fromkeys(names, 2), names[0]: 3}


async def test_own_records_are_skipped_silently(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1, node="me")
    async with watcher.watch({topic: {}}, node=["me", "other"]) as stream:
        assert (await stream.next()).name == "caught-up"
        await watcher.write(topic, 2, node="me")
        await watcher.write(topic, 3, node="you")
        record = await stream.next()
        assert record.seqs == [3]
        assert record.data["records"][0]["$node"] == "you"


async def test_the_fields_of_a_record_are_as_requested(watcher: Watcher, topic: str) -> None:
    body = {"records": [{"data": {"a": 1}, "tag": "t", "meta": {"m": 1}, "node": "n"}, {"data": 2}]}
    assert (await watcher.post(f"/v0/topics/{topic}", body)).status_code == 201
    async with watcher.watch({topic: {}}) as stream:
        dressed, plain = (await stream.next()).data["records"]
        assert dressed.keys() == {"$seq", "$ts", "$node", "data", "meta"}
        assert plain.keys() == {"$seq", "$ts", "data"}
    async with watcher.watch({topic: {}}, include_tags=True, include_meta=False) as stream:
        dressed, plain = (await stream.next()).data["records"]
        assert dressed.keys() == {"$seq", "$ts", "$node", "$tag", "data"}
    async with watcher.watch({topic: {}}, include_data=False, include_tags=True) as stream:
        dressed, plain = (await stream.next()).data["records"]
        assert dressed == {
            "$seq": 1,
            "$ts": dressed["$ts"],
            "$node": "n",
            "$tag": "t",
            "meta": {"m": 1},
        }
        assert plain.keys() == {"$seq", "$ts"}


# ---- gaps -------------------------------------------------------------------------------------------------


async def test_records_lost_before_the_watch_are_reported_as_too_old(watcher: Watcher, topic: str) -> None:
    async with watcher.client() as client:
        await client.put(f"/v0/topics/{topic}", json={"cap_records": 3})
    await watcher.write(topic, *range(6))
    async with watcher.watch({topic: {}}) as stream:
        gap, record, caught_up = await stream.take(3)
        assert gap.name == "tombstone"
        assert gap.data == {
            "topic": topic,
            "reason": "from_seq_too_old",
            "gap_from": 1,
            "gap_to": 3,
            "earliest_seq": 4,
            "head_seq": 6,
        }
        assert read_id(gap.id) == {topic: 3}
        assert record.seqs == [4, 5, 6]
        assert record.data["from_seq"] == 3
        assert caught_up.name == "caught-up"


async def test_records_lost_while_watching_keep_their_reason(watcher: Watcher, topic: str) -> None:
    async with watcher.client() as client:
        await client.put(f"/v0/topics/{topic}", json={"cap_records": 2})
    await watcher.write(topic, 1)
    async with watcher.watch({topic: {}}) as stream:
        await stream.until_caught_up()
        await watcher.write(topic, *range(10))  # more at once than the topic keeps
        gap, record = await stream.take(2)
        assert (gap.name, gap.data["reason"]) == ("tombstone", "cap")
        assert (gap.data["gap_from"], gap.data["gap_to"]) == (2, 9)
        assert record.seqs == [10, 11]


async def test_deleted_records_leave_no_trace(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1, 2, 3)
    await watcher.post(f"/v0/topics/{topic}/delete", {"before_seq": 3})
    async with watcher.watch({topic: {}}) as stream:
        record, caught_up = await stream.take(2)
        assert (record.seqs, caught_up.name) == ([3], "caught-up")


async def test_a_topic_recreated_before_the_stream_opens_is_reported(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, *range(5))
    created = await watcher.create({topic: {"from_seq": 1}})
    async with watcher.client() as client:
        await client.delete(f"/v0/topics/{topic}")
    await watcher.write(topic, "new", "newer")
    async with watcher.open(created["wid"]) as stream:
        gap, record = await stream.take(2)
        assert (gap.name, gap.data["reason"]) == ("tombstone", "recreated")
        assert read_id(gap.id) == {topic: 0}
        assert [one["data"] for one in record.data["records"]] == ["new", "newer"]


# ---- deleted topics ---------------------------------------------------------------------------------------


async def test_a_deleted_topic_is_reported_immediately_and_the_last_one_ends_the_stream(
    watcher: Watcher,
) -> None:
    first, second = fresh_name(), fresh_name()
    for name in (first, second):
        await watcher.write(name, 1)
    async with watcher.watch({first: {}, second: {}}, heartbeat_ms=60_000) as stream:
        await stream.take(4)
        async with watcher.client() as client:
            await client.delete(f"/v0/topics/{first}")
            event = await stream.next()
            assert event.name == "topic-deleted"
            assert event.data == {"topic": first, "head_seq": 0, "reason": "deleted"}
            assert event.id is not None
            await watcher.write(second, 2)
            assert (await stream.next()).seqs == [2]
            assert (await stream.next()).name == "caught-up"
            await client.delete(f"/v0/topics/{second}")
        assert (await stream.next()).name == "topic-deleted"
        assert await stream.ended()


async def test_a_recreated_topic_is_not_the_watched_one(watcher: Watcher) -> None:
    kept, gone = fresh_name(), fresh_name()
    for name in (kept, gone):
        await watcher.write(name, 1)
    async with watcher.watch({kept: {}, gone: {}}) as stream:
        await stream.take(4)
        async with watcher.client() as client:
            await client.delete(f"/v0/topics/{gone}")
        assert (await stream.next()).name == "topic-deleted"
        await watcher.write(gone, "another")
        await watcher.write(kept, 2)
        event = await stream.next()
        assert (event.data["topic"], event.seqs) == (kept, [2])
        assert read_id(event.id) == {kept: 2}


# ---- reconnecting -----------------------------------------------------------------------------------------


async def test_a_client_that_reconnects_resumes_at_its_position(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1, 2)
    created = await watcher.create({topic: {}})
    async with watcher.open(created["wid"]) as stream:
        await stream.until_caught_up()
    await watcher.write(topic, 3)
    async with watcher.open(created["wid"]) as stream:
        assert (await stream.next()).seqs == [3]


async def test_the_last_event_id_only_rewinds(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1)
    created = await watcher.create({topic: {}})
    async with watcher.open(created["wid"]) as stream:
        early = (await stream.next()).id
        await stream.next()
        await watcher.write(topic, 2)
        late = (await stream.next()).id
    assert early is not None
    assert late is not None
    async with watcher.open(created["wid"], **{"Last-Event-ID": early}) as stream:
        assert (await stream.next()).seqs == [2]
        await stream.next()
        await watcher.write(topic, 3)
        future = (await stream.next()).id
    assert future is not None
    fresh = await watcher.create({topic: {}})
    async with watcher.open(fresh["wid"], **{"Last-Event-ID": future}) as stream:
        assert (await stream.next()).seqs == [1, 2, 3]


@pytest.mark.parametrize("ident", ["", "not base64!", "e30", "W10", "eyJ4IjoieSJ9", "eyJ4IjotMX0"])
async def test_a_foreign_event_id_is_ignored(watcher: Watcher, topic: str, ident: str) -> None:
    await watcher.write(topic, 1, 2)
    created = await watcher.create({topic: {"from_seq": 1}})
    async with watcher.open(created["wid"], **{"Last-Event-ID": ident}) as stream:
        assert (await stream.next()).seqs == [2]


async def test_a_second_stream_takes_over_from_the_first(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1)
    created = await watcher.create({topic: {}})
    async with watcher.open(created["wid"]) as first:
        await first.until_caught_up()
        async with watcher.open(created["wid"]) as second:
            assert (await second.next()).name == "caught-up"
            assert await first.ended()
            await watcher.write(topic, 2)
            assert (await second.next()).seqs == [2]


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["text/event-stream", "*/*", "text/html, text/event-stream;q=0.9", None])
async def test_streams_require_an_accept_header_for_events(
    watcher: Watcher, topic: str, accept: str | None
) -> None:
    await watcher.write(topic, 1)
    created = await watcher.create({topic: {}})
    async with watcher.client() as client:
        del client.headers["accept"]
        headers = {} if accept is None else {"Accept": accept}
        async with client.stream("GET", created["stream_url"], headers=headers) as response:
            assert response.status_code == 200


async def test_not_acceptable_precedes_not_found(watcher: Watcher) -> None:
    async with watcher.client() as client:
        refused = await client.get("/v0/watch/wid_none", headers={"Accept": "application/json"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (406, "not_acceptable")
        missing = await client.get("/v0/watch/wid_none", headers={"Accept": "text/event-stream"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_other_methods_are_not_allowed(watcher: Watcher) -> None:
    async with watcher.client() as client:
        assert (await client.post("/v0/watch/wid_x", json={})).status_code == 405
        assert (await client.get("/v0/watch")).status_code == 405
        assert (await client.post("/v0/watch", content=b"{}")).status_code == 415


# ---- heartbeats -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_silent_stream_sends_heartbeats(quick: Server, protocol: str, topic: str) -> None:
    watcher = Watcher(quick, protocol)
    await watcher.write(topic, 1)
    async with watcher.watch({topic: {}}, heartbeat_ms=20) as stream:
        await stream.until_caught_up()
        for _ in range(3):
            beat = await stream.next(heartbeats=True)
            assert re.fullmatch(r": hb \d{13}", beat.data)
        await watcher.write(topic, 2)
        assert (await stream.next()).seqs == [2]


async def test_heartbeats_are_clamped_to_a_second_at_least(watcher: Watcher, topic: str) -> None:
    await watcher.write(topic, 1)
    async with watcher.watch({topic: {}}, heartbeat_ms=1) as stream:
        await stream.until_caught_up()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.7):
                await stream.next(heartbeats=True)


# ---- beyond the contract ----------------------------------------------------------------------------------


async def test_a_watch_may_choose_by_tag(watcher: Watcher, topic: str) -> None:
    async def write(tag: str | None, data: int) -> None:
        await watcher.post(f"/v0/topics/{topic}", {"records": [{"data": data, "tag": tag}]})

    for number, tag in enumerate(["a1", "b1", None, "a2"]):
        await write(tag, number)
    async with watcher.watch({topic: {}}, match="a*") as stream:
        assert (await stream.next()).seqs == [1, 4]
        await stream.next()
        await write("b2", 5)
        await write("a3", 6)
        assert (await stream.next()).seqs == [6]
    async with watcher.watch({topic: {}}, match=["tag", "Eq", "b1"]) as stream:
        assert (await stream.next()).seqs == [2]


async def test_a_star_follows_every_topic_with_the_prefix_including_new_ones(watcher: Watcher) -> None:
    stem = fresh_name("star")
    await watcher.write(f"{stem}.a", 1)
    async with watcher.watch({f"{stem}.*": {"tail": True}}) as stream:
        event = await stream.next()
        assert (event.name, event.data["topic"]) == ("caught-up", f"{stem}.a")
        await watcher.write(f"{stem}.b", "first")
        events = [await stream.next()]
        while events[-1].name != "record":
            events.append(await stream.next())
        assert events[-1].data["topic"] == f"{stem}.b"
        assert [one["data"] for one in events[-1].data["records"]] == ["first"]
        await watcher.write(f"{stem}x", "not meant")
        await watcher.write(f"{stem}.a", 2)
        named = {(await stream.next()).data["topic"] for _ in range(3)}
        assert f"{stem}x" not in named


async def test_a_star_that_matches_nothing_waits(watcher: Watcher) -> None:
    stem = fresh_name("star")
    async with watcher.watch({f"{stem}.*": {}}) as stream:
        await watcher.write(f"{stem}.new", 1)
        events = [await stream.next()]
        while events[-1].name != "record":
            events.append(await stream.next())
        assert read_id(events[-1].id) == {f"{stem}.new": 1}


# ---- shutdown ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_server_that_stops_reports_it_and_ends_every_stream(tmp_path: Path, protocol: str) -> None:
    with serving(tmp_path / "data") as server:
        watcher = Watcher(server, protocol)
        await watcher.write("x", 1)
        async with watcher.watch({"x": {}}) as stream:
            await stream.until_caught_up()
            stopping = asyncio.create_task(asyncio.to_thread(server.stop))
            event = await stream.next()
            assert event.name == "error"
            assert event.data["code"] == "server_shutting_down"
            assert event.data["message"]
            assert await stream.ended()
        assert await stopping == 0
