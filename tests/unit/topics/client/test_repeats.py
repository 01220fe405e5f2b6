"""Which calls the client retries, and which it never does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import httpx
import pytest
from tests.unit.topics.client.fake_server import WRITTEN, FakeServer, Step, answer, page, refusal

from penstock import errors as kinds
from penstock.topics import errors
from penstock.topics.client import Client, ServerFailed, Unanswered, Unreachable

CUT = httpx.ReadError("cut")
LATE = httpx.ReadTimeout("late")
NO_ROUTE = httpx.ConnectError("refused")
DEDUPED = WRITTEN | {"deduped": True}


def write(client: Client) -> Awaitable[object]:
    return client.write("t", [1])


def unkeyed(client: Client) -> Awaitable[object]:
    client._mint_keys = False
    return client.write("t", [1])


def diff(client: Client) -> Awaitable[object]:
    return client.diff("t")


def delete(client: Client) -> Awaitable[object]:
    return client.delete("t", before_seq=1)


def remove(client: Client) -> Awaitable[object]:
    return client.remove_topic("t")


def put(client: Client) -> Awaitable[object]:
    return client.put_topic("t")


Act = Callable[[Client], Awaitable[object]]


@pytest.mark.parametrize("lost", [CUT, LATE, httpx.RemoteProtocolError("closed"), httpx.Response(502)])
async def test_a_write_whose_answer_was_lost_is_repeated_under_the_same_key(lost: Step) -> None:
    server = FakeServer(lost, lost, answer(DEDUPED))
    async with server.client() as client:
        assert (await client.write("t", [1])).deduped
    assert len({request.content for request in server.requests}) == 1
    assert len(server.requests) == 3


async def test_two_writes_have_two_keys() -> None:
    server = FakeServer(answer(WRITTEN), answer(WRITTEN))
    async with server.client() as client:
        await client.write("t", [1])
        await client.write("t", [1])
    assert server.body(0)["idempotency_key"] != server.body(1)["idempotency_key"]


async def test_a_given_key_is_used_unchanged() -> None:
    server = FakeServer(answer(WRITTEN))
    async with server.client() as client:
        await client.write("t", [1], idempotency_key="mine")
    assert server.body()["idempotency_key"] == "mine"


@pytest.mark.parametrize("act", [unkeyed, delete, remove, put])
@pytest.mark.parametrize("lost", [CUT, LATE, httpx.Response(504)])
async def test_a_change_without_a_key_is_sent_once_when_its_answer_is_lost(act: Act, lost: Step) -> None:
    server = FakeServer(lost)
    async with server.client() as client:
        with pytest.raises(kinds.OutcomeUnknown):
            await act(client)
    assert len(server.requests) == 1


@pytest.mark.parametrize("act", [write, unkeyed, delete, remove, put])
@pytest.mark.parametrize("refused", [NO_ROUTE, httpx.ConnectTimeout("slow"), refusal(503, "not_ready")])
async def test_any_call_is_repeated_while_it_certainly_had_no_effect(act: Act, refused: Step) -> None:
    server = FakeServer(refused, refused, refusal(400, "invalid_request"))
    async with server.client() as client:
        with pytest.raises(errors.InvalidRequest):
            await act(client)
    assert len(server.requests) == 3


@pytest.mark.parametrize("lost", [CUT, LATE, NO_ROUTE, httpx.Response(502), refusal(500, "internal")])
async def test_a_read_is_repeated_whatever_happened_to_it(lost: Step) -> None:
    server = FakeServer(lost, page([], 0, 0))
    async with server.client() as client:
        assert (await client.diff("t")).caught_up


async def test_a_read_that_never_succeeds_ends_at_the_deadline_as_unavailable() -> None:
    server = FakeServer(*[CUT] * 1000)
    async with server.client(retry_deadline="10s") as client:
        with pytest.raises(Unreachable, match="http://there:4000"):
            await client.diff("t")
    assert 5 < server.clock.now_s <= 10


async def test_a_write_that_fails_after_a_lost_answer_is_of_unknown_outcome_even_if_the_server_is_gone() -> (
    None
):
    server = FakeServer(CUT, *[NO_ROUTE] * 1000)
    async with server.client(retry_deadline="10s") as client:
        with pytest.raises(Unanswered, match=r"may have been applied.*since then.*no connection"):
            await client.write("t", [1])


async def test_a_write_that_was_never_sent_is_certainly_not_applied() -> None:
    server = FakeServer(*[NO_ROUTE] * 1000)
    async with server.client(retry_deadline="10s") as client:
        with pytest.raises(Unreachable, match="no connection"):
            await client.write("t", [1])


async def test_a_write_is_not_repeated_after_a_server_restart() -> None:
    server = FakeServer(NO_ROUTE, CUT)

    def cut_and_restart(request: httpx.Request) -> httpx.Response:
        server.clock.now_s += 1
        server.started_s = server.clock.now_s
        raise CUT

    server.steps[1:] = [cut_and_restart]
    async with server.client() as client:
        with pytest.raises(Unanswered, match="restarted during"):
            await client.write("t", [1])
    assert len(server.requests) == 2


async def test_a_refusal_after_a_lost_answer_does_not_settle_it() -> None:
    server = FakeServer(CUT, refusal(403, "forbidden"))
    async with server.client() as client:
        with pytest.raises(Unanswered, match="since then: because of forbidden"):
            await client.write("t", [1])


@pytest.mark.parametrize(
    ("reply", "wait_s"),
    [
        (refusal(429, "throttled", Retry_After="3"), 3.0),
        (refusal(503, "shutting_down", Retry_After="2"), 2.0),
        (refusal(429, "throttled", {"retry_after_ms": 250}, Retry_After="1"), 0.25),
        (refusal(429, "throttled"), 1.0),
        (refusal(429, "throttled", Retry_After="Mon, 01 Jan 2035 00:00:00 GMT"), 1.0),
        (refusal(429, "throttled", Retry_After="-5"), 0.0),
    ],
)
async def test_a_busy_server_is_not_called_before_its_retry_time(
    reply: httpx.Response, wait_s: float
) -> None:
    server = FakeServer(reply, answer(WRITTEN))
    async with server.client() as client:
        await client.write("t", [1])
    assert sum(server.clock.slept) >= wait_s
    assert not wait_s or server.clock.slept[0] == wait_s


async def test_a_wait_beyond_the_deadline_is_not_started() -> None:
    server = FakeServer(refusal(429, "throttled", Retry_After="30"))
    async with server.client(retry_deadline="5s") as client:
        with pytest.raises(errors.Throttled):
            await client.write("t", [1])
    assert server.clock.slept == []


async def test_probes_are_not_retried() -> None:
    server = FakeServer(
        refusal(503, "not_ready", {"replay_progress": 0.5}), refusal(500, "internal"), NO_ROUTE
    )
    async with server.client() as client:
        with pytest.raises(errors.NotReady) as caught:
            await client.ready()
        with pytest.raises(ServerFailed):
            await client.metrics()
        with pytest.raises(Unreachable):
            await client.ready()
    assert caught.value.detail == {"replay_progress": 0.5}


async def test_following_yields_every_page_that_moves_and_waits_at_the_head() -> None:
    one = {"$seq": 1, "$ts": 1, "data": 1}
    server = FakeServer(
        page([], 0, 0),
        page([one], 1, 1),
        page([], 1, 1),
        page([], 5, 5),  # four records of the reader's own node: nothing to deliver, but the position moves
        refusal(404, "topic_not_found"),
    )
    seen: list[tuple[int, int]] = []
    async with server.client() as client:
        try:
            async for got in client.follow("t", node="me"):
                seen.append((len(got.fragments), got.next_from_seq))
        except errors.TopicNotFound:
            seen.append((-1, -1))
    assert seen == [(1, 1), (0, 5), (-1, -1)]
    assert [server.body(number).get("from_seq") for number in range(5)] == [0, 0, 1, 1, 5]
    assert {server.body(number)["wait_ms"] for number in range(5)} == {30_000}


async def test_following_shows_every_gap() -> None:
    gap = {
        "gap_from": 1,
        "gap_to": 3,
        "reason": "cap",
        "missed_estimate": 3,
        "earliest_seq": 4,
        "head_seq": 4,
    }
    again = gap | {"gap_to": 0, "reason": "recreated", "earliest_seq": 1, "head_seq": 0}
    server = FakeServer(
        page([{"$seq": 4, "$ts": 1, "data": 1}], 4, 4, tombstone=gap),
        page([], 4, 0, tombstone=again),
        page([{"$seq": 1, "$ts": 1, "data": 1}], 1, 1),
    )
    async with server.client() as client:
        pages = client.follow("t")
        first, second, third = [await anext(pages) for _ in range(3)]
        await pages.aclose()
    assert first.tombstone is not None
    assert (first.tombstone.gap_from, first.tombstone.gap_to, first.tombstone.reason) == (1, 3, "cap")
    assert second.tombstone is not None
    assert second.tombstone.reason == "recreated"
    assert third.tombstone is None
    assert [server.body(number)["from_seq"] for number in range(3)] == [0, 4, 0]


async def test_following_survives_a_connection_that_is_cut() -> None:
    server = FakeServer(CUT, page([{"$seq": 1, "$ts": 1, "data": 1}], 1, 1))
    async with server.client() as client:
        pages = client.follow("t")
        assert (await anext(pages)).next_from_seq == 1
        await pages.aclose()
