"""§5.2: waiting for a record."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tests.contract.topics_server import PROTOCOLS, Server

SOON_S = 4.0
"""Much longer than a wakeup takes, and much shorter than the polls here wait."""
WAIT_MS = 20_000


@pytest.fixture
async def other(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A client for requests that must not wait for polls: it reads one HTTP/2 response at a time."""
    async with httpx.AsyncClient(base_url=server.url, timeout=40, trust_env=False) as opened:
        yield opened


@pytest.fixture(params=PROTOCOLS)
async def client(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[httpx.AsyncClient]:
    is_h2 = request.param == "h2"
    async with httpx.AsyncClient(
        base_url=server.url, http1=not is_h2, http2=is_h2, timeout=40, trust_env=False
    ) as opened:
        yield opened


async def poll(client: httpx.AsyncClient, topic: str, **fields: Any) -> httpx.Response:
    return await client.post(f"/v0/topics/{topic}/diff", json={"wait_ms": WAIT_MS, **fields})


async def write(client: httpx.AsyncClient, topic: str, **record: Any) -> int:
    answer = await client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, **record}]})
    return int(answer.json()["first_seq"])


async def parked(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str, **fields: Any
) -> asyncio.Task[httpx.Response]:
    """Start a poll and wait until the server has begun it, which updates the topic's read time."""
    before = await last_read(other, topic)
    task = asyncio.create_task(poll(client, topic, **fields))
    for _ in range(100):  # two looks within one millisecond cannot be distinguished
        if await last_read(other, topic) != before:
            break
        await asyncio.sleep(0.002)
    return task


async def last_read(other: httpx.AsyncClient, topic: str) -> int:
    state = (await other.get(f"/v0/topics/{topic}?touch=false")).json()
    return int(state["last_read_ts"] or 0)


async def test_a_poll_ends_as_soon_as_something_is_written(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}")
    waiting = await parked(client, other, topic)
    began = time.monotonic()
    await write(other, topic)
    page = (await asyncio.wait_for(waiting, SOON_S)).json()
    assert time.monotonic() - began < SOON_S
    assert [record["$seq"] for record in page["records"]] == [1]
    assert (page["next_from_seq"], page["caught_up"]) == (1, True)


async def test_a_poll_with_records_to_return_does_not_wait(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}", json={"cap_records": 2})
    for _ in range(4):
        await write(other, topic)
    for fields in ({"from_seq": 3}, {"from_seq": 9}, {}, {"limit": 1, "from_seq": 2}):
        answer = await asyncio.wait_for(poll(client, topic, **fields), SOON_S)
        assert answer.json()["records"] or answer.json()["tombstone"]


async def test_at_the_deadline_a_poll_returns_its_position(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await write(other, topic)
    began = time.monotonic()
    page = (await poll(client, topic, from_seq=1, wait_ms=200)).json()
    assert 0.19 < time.monotonic() - began < SOON_S
    assert (page["records"], page["next_from_seq"], page["caught_up"], page["tombstone"]) == (
        [],
        1,
        True,
        None,
    )


async def test_without_a_wait_an_empty_response_is_immediate(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}")
    began = time.monotonic()
    assert (await poll(client, topic, wait_ms=0)).json()["records"] == []
    assert time.monotonic() - began < SOON_S


async def test_a_wait_beyond_its_limit_is_accepted(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}")
    waiting = await parked(client, other, topic, wait_ms=2**32 - 1)
    await write(other, topic)
    assert (await asyncio.wait_for(waiting, SOON_S)).json()["records"]


async def test_a_filtered_record_wakes_the_reader_and_is_consumed(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}")
    waiting = await parked(client, other, topic, node="me")
    await write(other, topic, node="me")
    page = (await asyncio.wait_for(waiting, SOON_S)).json()
    assert (page["records"], page["next_from_seq"], page["caught_up"]) == ([], 1, True)


async def test_every_waiting_reader_is_woken(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}")
    waiting = [await parked(client, other, topic) for _ in range(30)]
    await write(other, topic)
    pages = await asyncio.wait_for(asyncio.gather(*waiting), SOON_S)
    assert [len(page.json()["records"]) for page in pages] == [1] * 30


async def test_a_write_to_another_topic_wakes_no_reader(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}")
    waiting = await parked(client, other, topic, wait_ms=400)
    await write(other, f"{topic}.other")
    assert (await waiting).json()["records"] == []


async def test_a_topic_deleted_while_a_reader_waits_is_not_found(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}")
    waiting = await parked(client, other, topic)
    await other.delete(f"/v0/topics/{topic}")
    answer = await asyncio.wait_for(waiting, SOON_S)
    assert answer.status_code == 404
    assert answer.json()["error"]["detail"] == {"topic": topic}


async def test_a_reader_that_leaves_while_it_waits_does_not_affect_others(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    await other.put(f"/v0/topics/{topic}")
    leaving = await parked(client, other, topic)
    staying = await parked(other, other, topic)
    leaving.cancel()
    await asyncio.wait([leaving])
    await write(other, topic)
    assert len((await asyncio.wait_for(staying, SOON_S)).json()["records"]) == 1


@pytest.mark.parametrize("durability", ["ephemeral", "disk", "fsync"])
async def test_no_wakeup_is_lost_when_a_write_races_with_a_poll(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str, durability: str
) -> None:
    """A poll that misses its record would wait until its deadline: nothing else is written."""
    rng = random.Random(durability)
    await other.put(f"/v0/topics/{topic}", json={"durability": durability})
    for turn in range(80):

        async def late_write() -> int:
            await asyncio.sleep(rng.choice((0, 0, 0.0005, 0.001, 0.002)))
            return await write(other, topic)

        both = asyncio.gather(poll(client, topic, from_seq=turn), late_write())
        page, seq = await asyncio.wait_for(both, SOON_S)
        assert seq == turn + 1
        assert [record["$seq"] for record in page.json()["records"]] == [seq]


async def test_readers_that_follow_concurrent_writers_see_everything_once_and_in_order(
    client: httpx.AsyncClient, other: httpx.AsyncClient, topic: str
) -> None:
    total = 120
    await other.put(f"/v0/topics/{topic}")

    async def follow() -> list[int]:
        seen: list[int] = []
        while len(seen) < total:
            page = (await poll(client, topic, from_seq=seen[-1] if seen else 0, limit=7)).json()
            seen += [record["$seq"] for record in page["records"]]
        return seen

    async def produce() -> None:
        for _ in range(total // 4):
            await write(other, topic)

    followers = [asyncio.create_task(follow()) for _ in range(4)]
    await asyncio.gather(*(produce() for _ in range(4)))
    for seen in await asyncio.wait_for(asyncio.gather(*followers), 20):
        assert seen == list(range(1, total + 1))
