"""A relay over scripted responses: the order of its calls, and its reaction to a changing topic."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.unit.topics.client.fake_server import FakeServer, Step, answer, page, refusal

from penstock import errors
from penstock.buffer import Consumer, ConsumerConfig, ProducerConfig
from penstock.objects import MemoryStore
from penstock.services import Relay, RelayConfig, RelayGap, TopicChanged
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.errors import TopicNotFound

CONFIG = msgspec.to_builtins(TopicConfig(durability=Durability.FSYNC).resolved("t"))


def state(head: int, earliest: int = 1) -> Step:
    return answer(
        {
            "topic": "t",
            "config": CONFIG,
            "head_seq": head,
            "earliest_seq": earliest,
            "count": 0,
            "bytes": 0,
            "effective_priority": 0,
        }
    )


def record(seq: int) -> dict[str, object]:
    return {"$seq": seq, "$ts": 1000 + seq, "data": seq}


def gone(first: int, last: int, reason: str = "cap") -> dict[str, object]:
    return {
        "gap_from": first,
        "gap_to": last,
        "reason": reason,
        "missed_estimate": last - first + 1,
        "earliest_seq": last + 1,
        "head_seq": 9,
    }


def relay(server: FakeServer, store: MemoryStore, **settings: object) -> Relay:
    queue = ProducerConfig(store=store, flush_interval="1ms")
    config = RelayConfig(topic="t", queue=queue, retry_for="1s", **settings)  # type: ignore[arg-type]
    return Relay(server.client(retry_deadline="0s"), config)


async def delivered(store: MemoryStore) -> list[int]:
    consumer = await Consumer.open(ConsumerConfig(store=store))
    found: list[int] = []
    while (batch := await consumer.next_batch()) is not None:
        found += [msgspec.json.decode(entry)["data"] for entry in batch.entries]
    await consumer.close()
    return found


@pytest.mark.parametrize(
    ("tombstone", "error"), [(gone(3, 5), RelayGap), (gone(1, 9, "recreated"), TopicChanged)]
)
async def test_records_before_an_error_are_relayed_first(
    tombstone: dict[str, object], error: type[Exception]
) -> None:
    store = MemoryStore("before")
    broken = page([record(6)], 6, 9, tombstone=tombstone)
    server = FakeServer(state(9), page([record(1), record(2)], 2, 9), broken, broken)
    job = relay(server, store)
    with pytest.raises(error):
        await job.run(once=True)
    assert (job.report.records, job.report.through) == (2, 2)
    assert await delivered(store) == [1, 2]


async def test_the_next_batch_is_read_while_one_is_stored() -> None:
    store = MemoryStore("ahead")
    pages = [page([record(n)], n, 3) for n in (1, 2, 3)]
    server = FakeServer(state(3), *pages)
    config = ProducerConfig(store=store, flush_size_bytes=1)
    job = Relay(server.client(), RelayConfig(topic="t", queue=config))
    assert (await job.run(once=True)).batches == 3
    assert [server.body(n)["from_seq"] for n in (1, 2, 3)] == [0, 1, 2]
    assert await delivered(store) == [1, 2, 3]


async def test_an_unavailable_server_is_reported_after_a_while_and_a_refusal_immediately() -> None:
    away = FakeServer(*[refusal(503, "not_ready") for _ in range(200)])
    with pytest.raises(errors.Unavailable):
        await relay(away, MemoryStore("away")).run(once=True)
    assert len(away.requests) > 1
    absent = FakeServer(refusal(404, "topic_not_found", {"topic": "t"}))
    with pytest.raises(TopicNotFound):
        await relay(absent, MemoryStore("absent")).run(once=True)


async def test_a_relay_stopped_while_it_waits_ends_immediately() -> None:
    store = MemoryStore("waiting")
    client = FakeServer(state(0)).client()
    requested = asyncio.Event()

    async def diff(*_: object, **__: object) -> None:
        requested.set()
        await asyncio.Event().wait()

    client.diff = diff  # type: ignore[method-assign, assignment]
    job = Relay(client, RelayConfig(topic="t", queue=ProducerConfig(store=store)))
    running = asyncio.create_task(job.run())
    await requested.wait()
    job.stop()
    assert (await asyncio.wait_for(running, 5)).records == 0


async def test_a_relay_stopped_before_it_starts_ends_immediately() -> None:
    client = FakeServer().client()
    requested = asyncio.Event()

    async def silent(*_: object, **__: object) -> None:
        requested.set()
        await asyncio.Event().wait()

    client.state = silent  # type: ignore[method-assign, assignment]
    job = Relay(client, RelayConfig(topic="t", queue=ProducerConfig(store=MemoryStore("early"))))
    running = asyncio.create_task(job.run())
    await requested.wait()
    job.stop()
    assert (await asyncio.wait_for(running, 5)).records == 0


async def test_pages_without_records_advance_without_a_batch() -> None:
    store = MemoryStore("deleted")
    server = FakeServer(state(9), page([], 4, 9), page([], 9, 9))
    report = await relay(server, store).run(once=True)
    assert (report.through, report.batches, report.lag) == (9, 0, 0)
