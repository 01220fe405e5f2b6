"""The client with scripted responses: its requests, its results and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterable

import httpx
import msgspec
import pytest
from tests.unit.topics.client.fake_server import WRITTEN, FakeServer, answer, page, refusal

from penstock import errors as kinds
from penstock.topics import errors
from penstock.topics.client import (
    Client,
    Forbidden,
    PayloadTooLarge,
    RequestRefused,
    ServerFailed,
    Unauthorized,
    UnexpectedAnswer,
)
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.model import NewRecord, Predicate

CONFIG = msgspec.to_builtins(TopicConfig().resolved("t"))


async def test_a_write_sends_values_json_text_and_records_side_by_side() -> None:
    server = FakeServer(answer(WRITTEN))
    record = NewRecord(data=msgspec.Raw(b'{"b": 2}'), tag="own", meta=msgspec.Raw(b'{"m":1}'))
    async with server.client() as client:
        await client.write(
            "t", [{"a": 1}, b"[1, 2]", msgspec.Raw(b"null"), record, "text"], tag="all", node="n"
        )
    sent = server.body()
    assert sent["records"] == [
        {"data": {"a": 1}, "tag": "all"},
        {"data": [1, 2], "tag": "all"},
        {"data": None, "tag": "all"},
        {"data": {"b": 2}, "tag": "own", "meta": {"m": 1}},
        {"data": "text", "tag": "all"},
    ]
    assert sent["node"] == "n"
    assert len(str(sent["idempotency_key"])) == 26
    (request,) = server.requests
    assert request.headers["content-type"] == "application/json"
    assert str(request.url) == "http://there:4000/v0/topics/t?return_seqs=false"


async def test_a_write_returns_the_sequences_and_its_timings() -> None:
    async with FakeServer(answer(WRITTEN, 201)).client() as client:
        result = await client.write("t", [1])
    assert (result.first_seq, result.last_seq, result.count, result.deduped) == (1, 1, 1, False)
    assert (result.wal_append_ms, result.fsync_ms) == (0.5, 0.25)


@pytest.mark.parametrize("text", [b"", b"{", b'1},{"data":2', b"1 2", b"nul", b"[1,]"])
async def test_json_text_that_is_not_one_value_is_never_sent(text: bytes) -> None:
    server = FakeServer()
    async with server.client() as client:
        with pytest.raises(errors.InvalidRequest, match="record 1 is not JSON"):
            await client.write("t", [1, text])
    assert server.requests == []


@pytest.mark.parametrize("records", [{"a": 1}, "text", b"1", NewRecord(data=msgspec.Raw(b"1"))])
async def test_a_single_record_must_be_in_a_list(records: Iterable[object]) -> None:
    async with FakeServer().client() as client:
        with pytest.raises(errors.InvalidRequest, match="brackets"):
            await client.write("t", records)


@pytest.mark.parametrize("value", [object(), {1: {2, 3}, "x": 1j}])
async def test_a_value_that_json_cannot_hold_is_named(value: object) -> None:
    async with FakeServer().client() as client:
        with pytest.raises(errors.InvalidRequest, match="record 0 cannot be written as JSON"):
            await client.write("t", [value])


async def test_more_records_than_one_write_may_have_are_refused_before_they_are_sent() -> None:
    async with FakeServer().client() as client:
        with pytest.raises(errors.BatchTooLarge, match="10001 records"):
            await client.write("t", [1] * 10_001)


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "ä", ".", "x" * 256])
async def test_an_invalid_topic_name_never_becomes_a_path(name: str) -> None:
    server = FakeServer()
    async with server.client() as client:
        with pytest.raises(errors.InvalidRequest, match="not a topic name"):
            await client.remove_topic(name)
    assert server.requests == []


async def test_a_name_is_encoded_in_the_path() -> None:
    server = FakeServer(refusal(404, "topic_not_found", {"topic": "a:b"}))
    async with server.client() as client:
        with pytest.raises(errors.TopicNotFound) as caught:
            await client.state("a:b")
    assert server.requests[0].url.raw_path.startswith(b"/v0/topics/a%3Ab?")
    assert caught.value.detail == {"topic": "a:b"}


async def test_put_sends_the_whole_config_and_returns_the_resolved_one() -> None:
    server = FakeServer(answer({"topic": "t", "created": True, "config": CONFIG}, 201))
    async with server.client() as client:
        result = await client.put_topic("t", TopicConfig(cap_records=3))
    assert server.body()["cap_records"] == 3
    assert len(server.body()) == 17
    assert result.created
    assert result.config.durability is Durability.DISK


async def test_state_reads_a_topic_with_or_without_touching_it() -> None:
    state = {
        "topic": "t",
        "type": "log",
        "head_seq": 5,
        "earliest_seq": 3,
        "next_seq": 6,
        "count": 3,
        "bytes": 30,
        "config": CONFIG,
        "effective_priority": 500,
        "last_write_ts": 17,
        "last_read_ts": None,
    }
    server = FakeServer(answer(state))
    async with server.client() as client:
        found = await client.state("t", touch=False)
    assert (found.head_seq, found.count, found.last_write_ms, found.last_read_ms) == (5, 3, 17, None)
    assert server.requests[0].url.params["touch"] == "false"


async def test_topics_goes_through_every_page() -> None:
    def summary(name: str) -> dict[str, object]:
        numbers = {"head_seq": 1, "earliest_seq": 1, "count": 1, "bytes": 2, "effective_priority": 0}
        return {"topic": name, "durable": False} | numbers

    server = FakeServer(
        answer({"topics": [summary("a"), summary("b")], "next_cursor": "Y3Vyc29y"}),
        answer({"topics": [summary("c")]}),
    )
    async with server.client() as client:
        names = [found.topic async for found in client.topics("pre", page_size=2)]
    assert names == ["a", "b", "c"]
    assert [dict(request.url.params) for request in server.requests] == [
        {"prefix": "pre", "page_size": "2", "touch": "false"},
        {"prefix": "pre", "page_size": "2", "touch": "false", "cursor": "Y3Vyc29y"},
    ]


async def test_diff_returns_the_records_unchanged() -> None:
    stored = {"$seq": 7, "$ts": 12, "$node": "n", "$tag": "t", "data": {"z": 1, "a": [1.5]}, "meta": {"k": 1}}
    server = FakeServer(page([stored], 7, 9, performance={"records_scanned": 7}))
    async with server.client() as client:
        got = await client.diff("t", 6, limit=10, node="me", include_tags=True)
    assert server.body() == {"from_seq": 6, "limit": 10, "node": ["me"], "include_tags": True}
    (record,) = got.records()
    assert (record.seq, record.ts_ms, record.node, record.tag) == (7, 12, "n", "t")
    assert json.loads(bytes(record.data)) == {"z": 1, "a": [1.5]}
    assert (got.caught_up, got.lag, got.records_scanned) == (False, 2, 7)


async def test_the_timeout_of_a_long_poll_includes_its_wait() -> None:
    server = FakeServer(page([], 0, 0))
    async with server.client(timeout="2s") as client:
        await client.diff("t", wait_ms=90_000)
    assert server.body()["wait_ms"] == 30_000
    assert server.requests[0].extensions["timeout"] == {
        "connect": 2.0,
        "read": 32.0,
        "write": 2.0,
        "pool": 2.0,
    }


@pytest.mark.parametrize(
    ("match", "sent"),
    [
        ("a*", ["tag", "Eq", "a*"]),
        (Predicate(value="a"), ["tag", "Eq", "a"]),
        (Predicate(value="a", is_prefix=True), ["tag", "Glob", "a*"]),
    ],
)
async def test_delete_by_tag_sends_exactly_the_given_predicate(
    match: Predicate | str, sent: list[str]
) -> None:
    done = {"topic": "t", "deleted": 2, "earliest_seq": 3, "head_seq": 5, "count": 3, "bytes": 3}
    server = FakeServer(answer(done))
    async with server.client() as client:
        result = await client.delete("t", before_seq=4, match=match)
    assert server.body() == {"before_seq": 4, "match": sent}
    assert (result.deleted, result.count) == (2, 3)


async def test_a_delete_that_selects_nothing_is_refused_by_the_client() -> None:
    async with FakeServer().client() as client:
        with pytest.raises(errors.InvalidRequest, match="before_seq"):
            await client.delete("t")


async def test_removing_a_topic_returns_the_removed_routers() -> None:
    server = FakeServer(answer({"topic": "t", "deleted": True, "routers_removed": ["a->t"]}))
    async with server.client() as client:
        result = await client.remove_topic("t", if_empty=True)
    assert result.routers_removed == ("a->t",)
    assert server.requests[0].url.params["if_empty"] == "true"


async def test_probes_and_metrics_are_values() -> None:
    server = FakeServer(
        answer({"status": "ready", "wal_replay_complete": True, "topics": 3}),
        answer({"topics": 3, "wal": {"fsyncs": 1}}),
        httpx.Response(200, text="topics_topics 3\n"),
    )
    async with server.client() as client:
        assert (await client.health()).version == "0.1.0"
        assert (await client.ready()).topics == 3
        assert (await client.metrics())["wal"] == {"fsyncs": 1}
        assert await client.metrics_text() == "topics_topics 3\n"
    assert [request.headers["accept"] for request in server.requests[1:]] == [
        "application/json",
        "text/plain",
    ]


REFUSALS = [
    (400, "invalid_request", errors.InvalidRequest, kinds.InvalidInput),
    (400, "batch_too_large", errors.BatchTooLarge, kinds.LimitExceeded),
    (400, "record_too_large", errors.RecordTooLarge, kinds.LimitExceeded),
    (401, "unauthorized", Unauthorized, kinds.PermissionDenied),
    (403, "forbidden", Forbidden, kinds.PermissionDenied),
    (404, "topic_not_found", errors.TopicNotFound, kinds.NotFound),
    (409, "topic_exists_incompatible", errors.IncompatibleTopic, kinds.Conflict),
    (409, "topic_not_empty", errors.TopicNotEmpty, kinds.Conflict),
    (413, "payload_too_large", PayloadTooLarge, kinds.LimitExceeded),
    (422, "topic_full", errors.TopicFull, kinds.LimitExceeded),
    (429, "throttled", errors.Throttled, kinds.Unavailable),
    (500, "internal", errors.CommitFailed, kinds.Unavailable),
    (503, "not_ready", errors.NotReady, kinds.Unavailable),
    (503, "shutting_down", errors.ShuttingDown, kinds.Unavailable),
    (406, "not_acceptable", RequestRefused, kinds.Rejected),
    (409, "router_cycle", errors.RouterCycle, kinds.Conflict),
]


@pytest.mark.parametrize(("status", "code", "error", "kind"), REFUSALS)
async def test_every_code_of_the_contract_is_a_class_with_its_detail(
    status: int, code: str, error: type[errors.TopicError], kind: type[kinds.PenstockError]
) -> None:
    detail = {"topic": "t", "more": [1]}
    async with FakeServer(refusal(status, code, detail)).client(retry_deadline=0) as client:
        with pytest.raises(error) as caught:
            await client.write("t", [1])
    assert isinstance(caught.value, kind)
    assert caught.value.detail == ({"topic": "t"} if code == "topic_not_found" else detail)


async def test_a_record_that_cannot_be_read_back_is_damage_and_a_plain_failure_is_not() -> None:
    damage = refusal(500, "internal", {"topic": "t", "first_seq": 4, "last_seq": 4})
    server = FakeServer(damage, damage, refusal(500, "internal"))
    async with server.client(retry_deadline=0) as client:
        with pytest.raises(errors.Damaged):
            await client.diff("t")
        with pytest.raises(errors.Damaged):
            await client.delete("t", match="red")
        with pytest.raises(ServerFailed):
            await client.diff("t")


async def test_damage_is_not_retried() -> None:
    server = FakeServer(refusal(500, "internal", {"topic": "t", "first_seq": 4}), page([], 4, 4))
    async with server.client(retry_deadline=30) as client:
        with pytest.raises(errors.Damaged) as caught:
            await client.diff("t", 3)
    assert (len(server.requests), caught.value.detail) == (1, {"topic": "t", "first_seq": 4})


@pytest.mark.parametrize(
    "strange",
    [
        httpx.Response(404, text="<html>"),
        httpx.Response(301),
        answer({"error": "x"}, 400),
        answer([]),
        answer({}),
    ],
)
async def test_a_response_outside_the_contract_is_reported_as_such(strange: httpx.Response) -> None:
    async with FakeServer(strange).client() as client:
        with pytest.raises(UnexpectedAnswer):
            await client.write("t", [1])


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPICS_API_KEY", "s3cret")
    client = Client("http://there:4000")
    assert repr(client) == "Client('http://there:4000', key=***)"
    assert client._connection._http.headers["authorization"] == "Bearer s3cret"
    assert repr(Client(key="other")) == "Client('http://127.0.0.1:4000', key=***)"
    monkeypatch.delenv("TOPICS_API_KEY")
    assert repr(Client()) == "Client('http://127.0.0.1:4000', key=None)"


@pytest.mark.parametrize("key", ["s3cret word", "s3cret\n", "s3crét", ""])
def test_a_key_that_is_invalid_in_a_header_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(kinds.ConfigError) as caught:
        Client(key=key)
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["there:4000", "ftp://there", "http://", "http://me:s3cret@there", "http://there:x", ""]
)
def test_an_invalid_address_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(kinds.ConfigError) as caught:
        Client(url)
    assert "s3cret" not in str(caught.value)
