"""Watches of the client: they reconnect, and neither lose nor repeat events."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.unit.topics.client.fake_server import FakeServer, answer, refusal

from penstock.errors import Unavailable
from penstock.topics.client import UnexpectedAnswer, WatchEvent
from penstock.topics.client.watch import FrameReader
from penstock.topics.errors import Damaged, TopicNotFound
from penstock.topics.model import Predicate


def created(**topics: int) -> httpx.Response:
    places = {name: {"from_seq": seq, "head_seq": 9, "earliest_seq": 1} for name, seq in topics.items()}
    return answer({"wid": "wid_1", "stream_url": "/v0/watch/wid_1", "topics": places})


def frame(name: str, ident: str = "", **data: object) -> bytes:
    id_line = f"id: {ident}\n" if ident else ""
    return f"{id_line}event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def batch(first: int, last: int, ident: str, topic: str = "t") -> bytes:
    records = [{"$seq": seq, "$ts": 1, "data": seq} for seq in range(first, last + 1)]
    return frame(
        "record", ident, topic=topic, from_seq=first - 1, to_seq=last, head_seq=last, records=records
    )


def stream(*frames: bytes) -> httpx.Response:
    return httpx.Response(200, content=b"retry: 2000\n\n" + b": hb 1\n\n" + b"".join(frames))


GONE = frame("topic-deleted", "x", topic="t", head_seq=0, reason="deleted")


def sent(request: httpx.Request) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(request.content)
    return body


async def collect(server: FakeServer, topics: Any = ("t",), **options: Any) -> list[WatchEvent]:
    async with server.client() as client:
        return [event async for event in client.watch(topics, **options)]


def seqs(events: list[WatchEvent]) -> list[int]:
    return [record.seq for event in events for record in event.records()]


async def test_frames_are_decoded_to_events() -> None:
    gap = frame(
        "tombstone",
        "a",
        topic="t",
        reason="from_seq_too_old",
        gap_from=1,
        gap_to=3,
        earliest_seq=4,
        head_seq=5,
    )
    caught_up = frame("caught-up", "b", topic="t", head_seq=5)
    server = FakeServer(created(t=0), stream(gap, batch(4, 5, "b"), caught_up, GONE))
    events = await collect(server)
    assert [event.kind for event in events] == ["gap", "records", "caught_up", "deleted"]
    tombstone = events[0].tombstone
    assert tombstone is not None
    assert (tombstone.gap_from, tombstone.gap_to, tombstone.reason) == (1, 3, "from_seq_too_old")
    assert events[0].message == "from_seq_too_old"
    assert seqs(events) == [4, 5]
    assert events[1].to_seq == events[2].head_seq == 5


async def test_the_filter_is_sent() -> None:
    server = FakeServer(created(t=7, u=0), stream(GONE, GONE.replace(b'"t"', b'"u"')))
    match = Predicate(value="a", is_prefix=True)
    await collect(server, {"t": "tail", "u": 3}, node="me", limit=5, include_data=False, match=match)
    assert sent(server.requests[0]) == {
        "topics": {"t": {"tail": True}, "u": {"from_seq": 3}},
        "node": ["me"],
        "limit": 5,
        "include_data": False,
        "match": ["tag", "Glob", "a*"],
    }
    assert server.requests[1].headers["accept"] == "text/event-stream"
    assert "last-event-id" not in server.requests[1].headers


async def test_a_broken_stream_continues_after_the_last_yielded_event() -> None:
    server = FakeServer(
        created(t=0), stream(batch(1, 2, "two"), batch(3, 3, "three")[:-5]), stream(batch(3, 4, "four"), GONE)
    )
    assert seqs(await collect(server)) == [1, 2, 3, 4]
    assert server.requests[2].headers["last-event-id"] == "two"


async def test_a_stream_that_broke_before_its_first_event_gets_a_new_session() -> None:
    # The session counts sent records as read, and without an id this cannot be undone.
    server = FakeServer(created(t=4), httpx.ReadError("cut"), created(t=4), stream(batch(5, 5, "five"), GONE))
    assert seqs(await collect(server, {"t": "tail"})) == [5]
    assert sent(server.requests[2])["topics"] == {"t": {"from_seq": 4}}


async def test_a_lost_session_is_created_again_where_the_last_one_stopped() -> None:
    server = FakeServer(
        created(t=0),
        stream(batch(1, 3, "three")),
        refusal(404, "not_found"),
        created(t=3),
        stream(batch(4, 4, "four"), GONE),
    )
    assert seqs(await collect(server)) == [1, 2, 3, 4]
    again = server.requests[3]
    assert sent(again)["topics"] == {"t": {"from_seq": 3}}
    assert again.url.params["lenient"] == "true"
    assert "last-event-id" not in server.requests[4].headers


@pytest.mark.parametrize("start", ["tail", 7])
async def test_a_new_session_starts_new_topics_at_their_beginning(
    start: int | str,
) -> None:
    server = FakeServer(
        created(x1=4),
        stream(batch(5, 5, "five", "x1")),
        refusal(404, "not_found"),
        created(x1=5, x2=0),
        stream(batch(1, 1, "one", "x2"), frame("error", code=500, error="over", topic="x2")),
    )
    with pytest.raises(Damaged):
        await collect(server, {"x*": start})
    assert sent(server.requests[3])["topics"] == {"x*": {}, "x1": {"from_seq": 5}}


async def test_topics_that_appeared_before_the_first_event_are_not_skipped() -> None:
    over = frame("error", code=500, error="over", topic="x1")
    server = FakeServer(created(x1=4), httpx.ReadError("cut"), created(x1=4, x2=0), stream(over))
    with pytest.raises(Damaged):
        await collect(server, {"x*": "tail"})
    assert sent(server.requests[2])["topics"] == {"x*": {}, "x1": {"from_seq": 4}}


async def test_topics_deleted_while_the_server_was_away_are_reported() -> None:
    server = FakeServer(
        created(t=0, u=0),
        stream(batch(1, 1, "one")),
        refusal(404, "not_found"),
        created(t=1),
        stream(GONE),
    )
    events = await collect(server, ("t", "u"))
    assert [(event.kind, event.topic) for event in events] == [
        ("records", "t"),
        ("deleted", "u"),
        ("deleted", "t"),
    ]


async def test_a_server_that_shuts_down_or_throttles_is_retried() -> None:
    leaving = frame("error", code="server_shutting_down", message="bye")
    server = FakeServer(
        created(t=0),
        stream(batch(1, 1, "one"), leaving),
        refusal(503, "shutting_down", retry_after="1"),
        refusal(429, "throttled", retry_after="1"),
        stream(batch(2, 2, "two"), GONE),
    )
    assert seqs(await collect(server)) == [1, 2]
    assert sum(server.clock.slept) >= 2


async def test_a_server_that_stays_away_ends_the_watch() -> None:
    server = FakeServer(created(t=0), stream(batch(1, 1, "one")), *[httpx.ConnectError("no")] * 500)
    seen: list[WatchEvent] = []
    async with server.client() as client:
        watching = client.watch(["t"])
        seen.append(await anext(watching))
        with pytest.raises(Unavailable):
            await anext(watching)
    assert seqs(seen) == [1]


async def test_a_stream_that_always_ends_fails_at_the_deadline() -> None:
    server = FakeServer(*[created(t=0), stream()] * 500)
    with pytest.raises(Unavailable, match="ended the stream"):
        await collect(server)


async def test_an_unreadable_record_raises_damaged() -> None:
    server = FakeServer(created(t=0), stream(frame("error", code=500, error="damaged", topic="t")))
    with pytest.raises(Damaged, match="damaged"):
        await collect(server)


async def test_a_missing_topic_raises_not_found() -> None:
    with pytest.raises(TopicNotFound):
        await collect(FakeServer(refusal(404, "topic_not_found", {"topic": "t"})))


async def test_a_topic_beyond_the_limit_is_reported_and_unknown_events_are_skipped() -> None:
    warning = frame("error", code=429, error="too many", topics=["p9"])
    server = FakeServer(created(t=0), stream(frame("novelty", "n", a=1), warning, GONE))
    events = await collect(server)
    assert [(event.kind, event.topic) for event in events] == [("not_followed", "p9"), ("deleted", "t")]


async def test_a_deferred_topic_is_reported_and_still_followed() -> None:
    warning = frame("error", code=429, error="pressed", retry_after_ms=1000, topics=["t"])
    events = await collect(FakeServer(created(t=0), stream(warning, GONE)))
    assert [(event.kind, event.topic) for event in events] == [("put_off", "t"), ("deleted", "t")]


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"topic":"t"}'])
async def test_an_invalid_event_is_an_unexpected_answer(data: bytes) -> None:
    server = FakeServer(created(t=0), stream(b"event: record\ndata: " + data + b"\n\n"))
    with pytest.raises(UnexpectedAnswer):
        await collect(server)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_frames_are_split_correctly_for_any_chunks(size: int) -> None:
    text = (
        "retry: 1\n\n: hb\n\nid: a\nevent: x\ndata: \u2028\u0085 one\r\n\r\nevent: y\ndata:two\n\n".encode()
    )
    reader = FrameReader()
    frames = [
        frame for start in range(0, len(text), size) for frame in reader.feed(text[start : start + size])
    ]
    assert [(one.name, one.data.decode(), one.id) for one in frames] == [
        ("x", "\u2028\u0085 one", "a"),
        ("y", "two", ""),
    ]
