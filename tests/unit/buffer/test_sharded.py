from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.buffer.doubles import MANIFEST, Queue, golden

from penstock import errors
from penstock.buffer import (
    ConsumerConfig,
    FencedError,
    InvalidInputError,
    OutcomeUnknown,
    ProducerConfig,
    SerializationError,
    StorageRejected,
    sharded,
)
from penstock.buffer.sharded import ShardedConsumer, ShardedProducer, read_layout, shard_config, shard_of
from penstock.errors import ConfigError

LAYOUT = f"{MANIFEST}.shards/layout.json"


async def producer_of(q: Queue, shards: int | None = None, **settings: object) -> ShardedProducer:
    config = ProducerConfig(store=q.store, **settings)  # type: ignore[arg-type]
    return await ShardedProducer.open(config, shards, clock=q.clock, rng=q.rng, registry=q.registry)


async def consumer_of(q: Queue, last_acked: dict[int, int] | None = None) -> ShardedConsumer:
    config = ConsumerConfig(store=q.store, gc_enabled=False)
    return await ShardedConsumer.open(config, last_acked, clock=q.clock, rng=q.rng, registry=q.registry)


async def drained(consumer: ShardedConsumer) -> list[tuple[int | None, int, list[bytes]]]:
    out = []
    while (batch := await consumer.next_batch()) is not None:
        out.append((batch.shard, batch.sequence, batch.entries))
    return out


async def test_the_layout_is_written_once_and_must_agree(q: Queue) -> None:
    assert await read_layout(q.store, MANIFEST) is None
    with pytest.raises(ConfigError, match="set its number of shards"):
        await producer_of(q)
    async with await producer_of(q, 4) as producer:
        assert producer.shards == 4
    assert await q.raw(LAYOUT) == golden("v1.layout.json")
    async with await producer_of(q) as producer:
        assert producer.shards == 4
    with pytest.raises(ConfigError, match="has 4 shards, not 3"):
        await producer_of(q, 3)


@pytest.mark.parametrize("shards", [0, -1, 1025])
async def test_a_number_of_shards_out_of_range_is_refused(q: Queue, shards: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and 1024"):
        await producer_of(q, shards)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b'{"version":2,"shards":4}', b'{"version":1,"shards":0}', b'{"\xff":1}']
)
async def test_a_damaged_layout_is_reported(q: Queue, raw: bytes) -> None:
    await q.store_raw(LAYOUT, raw)
    with pytest.raises(SerializationError, match="layout"):
        await producer_of(q, 4)
    with pytest.raises(SerializationError, match="layout"):
        await consumer_of(q)


async def test_a_consumer_of_a_queue_without_shards_is_refused(q: Queue) -> None:
    with pytest.raises(ConfigError, match="not a sharded queue"):
        await consumer_of(q)


@given(st.binary(), st.integers(1, 1024))
def test_a_key_has_one_shard(key: bytes, shards: int) -> None:
    assert 0 <= shard_of(key, shards) < shards
    assert shard_of(key, shards) == shard_of(bytes(key), shards)


def test_the_shard_of_a_key_never_changes() -> None:
    assert [shard_of(key, 16) for key in (b"", b"a", b"customer-17")] == [2, 15, 12]


@pytest.mark.parametrize("path", ["ingest/manifest", "/ingest//manifest/"])
def test_every_spelling_of_a_path_names_the_same_shards(path: str) -> None:
    config = shard_config(ProducerConfig(store="memory://", manifest_path=path, data_path_prefix="/a//b/"), 3)
    assert config.manifest_key == "ingest/manifest.shards/0003"
    assert config.prefix == "a/b.shards/0003"


async def test_calls_of_one_key_stay_in_order_on_one_shard(q: Queue) -> None:
    async with await producer_of(q, 3, flush_interval="1h") as producer:
        for number in range(30):
            await producer.produce([b"%d" % number], key=b"key-%d" % (number % 5))
            if number % 7 == 0:
                await producer.flush()
    consumer = await consumer_of(q)
    order: dict[int | None, list[int]] = {}
    for shard, _, entries in await drained(consumer):
        order.setdefault(shard, []).extend(map(int, entries))
    assert sorted(n for numbers in order.values() for n in numbers) == list(range(30))
    for key in range(5):
        shard = shard_of(b"key-%d" % key, 3)
        assert [n for n in order[shard] if n % 5 == key] == list(range(key, 30, 5))
    await consumer.close()


async def test_calls_without_a_key_use_the_shards_in_turn(q: Queue) -> None:
    async with await producer_of(q, 3, flush_interval="1h") as producer:
        for number in range(6):
            await producer.produce([b"%d" % number])
    consumer = await consumer_of(q)
    assert len(consumer) == 3
    assert sorted(await drained(consumer)) == [
        (0, 0, [b"0", b"3"]),
        (1, 0, [b"1", b"4"]),
        (2, 0, [b"2", b"5"]),
    ]
    await consumer.close()


async def test_positions_resume_every_shard_where_it_was(q: Queue) -> None:
    async with await producer_of(q, 2, flush_interval="1h") as producer:
        for number in range(6):
            await producer.produce([b"%d" % number])
            await producer.flush()
    first = await consumer_of(q)
    assert first.positions() == {}
    batch = await first.next_batch()
    assert batch is not None
    await first.ack(batch)
    await first.ack_through({1: 1})
    assert first.positions() == {0: 0, 1: 1}
    second = await consumer_of(q, first.positions())
    assert sorted(await drained(second)) == [(0, 1, [b"2"]), (0, 2, [b"4"]), (1, 2, [b"5"])]
    with pytest.raises(FencedError):
        await first.next_batch()
    with pytest.raises(InvalidInputError, match="names shard 2"):
        await consumer_of(q, {2: 0})
    await second.close()


async def test_descriptors_carry_their_shard(q: Queue) -> None:
    async with await producer_of(q, 2, flush_interval="1h") as producer:
        for number in range(4):
            await producer.produce([b"%d" % number])
            await producer.flush()
    consumer = await consumer_of(q)
    handed = await consumer.next_descriptors(5)
    assert [(d.shard, d.sequence) for d in handed] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [(await consumer.fetch_descriptor(d)).entries for d in handed] == [[b"0"], [b"2"], [b"1"], [b"3"]]
    await consumer.ack_through({0: 1, 1: 0})
    await consumer.flush()
    assert consumer.positions() == {0: 1, 1: 0}
    assert len(consumer) == 1
    await consumer.close()


async def test_a_failing_shard_does_not_lose_the_descriptors_of_the_others(q: Queue) -> None:
    async with await producer_of(q, 2, flush_interval="1h") as producer:
        for number in range(2):
            await producer.produce([b"%d" % number])
    consumer = await consumer_of(q)
    q.store.before = lambda op, key: errors.PermissionDenied("no") if key.endswith("/0001") else None
    with pytest.raises(StorageRejected):
        await consumer.next_descriptors(5)
    q.store.before = lambda op, key: None
    assert [(d.shard, d.sequence) for d in await consumer.next_descriptors(5)] == [(0, 0), (1, 0)]
    assert await consumer.next_descriptors(5) == []
    await consumer.close()


async def test_a_layout_with_an_unknown_outcome_is_a_transient_fault(q: Queue) -> None:
    q.store.before = lambda op, key: errors.OutcomeUnknown("no answer") if op == "cas" else None
    with pytest.raises(OutcomeUnknown, match="no answer"):
        await producer_of(q, 2)


async def test_a_store_opened_for_shards_that_cannot_be_opened_is_closed_again(
    q: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []

    async def close() -> None:
        closed.append(True)

    monkeypatch.setattr(q.store, "close", close)
    monkeypatch.setattr(sharded, "open_store", lambda spec, **_settings: q.store)
    with pytest.raises(ConfigError):
        await ShardedProducer.open(ProducerConfig(store="memory://x"), 0)
    with pytest.raises(ConfigError):
        await ShardedConsumer.open(ConsumerConfig(store="memory://x"))
    assert len(closed) == 2
