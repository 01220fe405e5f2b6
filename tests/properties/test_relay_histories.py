"""Random histories of a relay: writes, deletions, eviction, relays that die anywhere or run concurrently,
and a consumer in between. In every history, each record is in the queue once, reported as a gap, or
deleted."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from tests.unit.topics.engine_doubles import World, rec

from penstock.buffer import Consumer, ConsumerConfig, ProducerConfig
from penstock.objects import MemoryStore
from penstock.services import Relay, RelayConfig, RelayTaken
from penstock.topics.config import Durability, TopicConfig
from penstock.topics.model import Page, Predicate, TopicState

CAP = 60


class EngineClient:
    """The two client calls that a relay makes, without HTTP."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def state(self, topic: str, *, touch: bool = True) -> TopicState:
        await asyncio.sleep(0)
        return self._world.engine.state(topic, touch=touch)

    async def diff(
        self,
        topic: str,
        from_seq: int = 0,
        *,
        limit: int = 0,
        include_tags: bool = False,
        include_meta: bool = True,
        wait_ms: int = 0,
        max_batch_bytes: int = 0,
    ) -> Page:
        await asyncio.sleep(0)
        # Short pages, so that a batch has several and a relay can fail between them.
        return await self._world.engine.diff(topic, from_seq, limit=min(limit, 7), include_tags=include_tags)


@dataclass
class History:
    """The operations of a history and their results."""

    world: World
    rng: random.Random
    store: MemoryStore = field(default_factory=lambda: MemoryStore("history"))
    written: dict[int, object] = field(default_factory=dict)
    deleted: set[int] = field(default_factory=set)
    delivered: list[int] = field(default_factory=list)
    missed: set[int] = field(default_factory=set)
    refused: int = 0

    def relay(self) -> Relay:
        queue = ProducerConfig(store=self.store, flush_size_bytes=self.rng.choice([1, 300, 10_000]))
        config = RelayConfig(topic="t", queue=queue, start=0, on_gap="record")
        return Relay(EngineClient(self.world), config)  # type: ignore[arg-type]

    async def write(self) -> None:
        tag = self.rng.choice(["keep", "drop"])
        values = [self.rng.random() for _ in range(self.rng.randint(1, 25))]
        result = await self.world.engine.write("t", [rec(value, tag=tag) for value in values])
        self.written |= dict(zip(range(result.first_seq, result.last_seq + 1), values, strict=True))

    async def delete(self) -> None:
        """Delete by tag. Readers can no longer get the deleted live records."""
        before = await self.live()
        await self.world.engine.delete("t", match=Predicate(value="drop"))
        self.deleted |= before - await self.live()

    async def live(self) -> set[int]:
        page = await self.world.engine.diff("t", 0, limit=1000)
        return {record.seq for record in page.records()}

    async def die_somewhere(self) -> None:
        """Run relays that are stopped at any await, sometimes two concurrently."""
        tasks = [asyncio.create_task(self.relay().run(once=True)) for _ in range(self.rng.choice([1, 1, 2]))]
        for _ in range(self.rng.randint(0, 120)):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            self.refused += isinstance(outcome, RelayTaken)
            if isinstance(outcome, Exception) and not isinstance(outcome, RelayTaken):
                raise outcome

    async def consume(self) -> None:
        consumer = await Consumer.open(ConsumerConfig(store=self.store))
        while (batch := await consumer.next_batch()) is not None:
            for entry in batch.entries:
                self.take(msgspec.json.decode(entry))
            await consumer.ack(batch.sequence)
        await consumer.close()

    def take(self, entry: dict[str, object]) -> None:
        if isinstance(gap := entry.get("gap"), dict):
            self.missed |= set(range(gap["first"], gap["last"] + 1))
            return
        seq = entry["$seq"]
        assert isinstance(seq, int)
        assert entry["data"] == self.written[seq]
        self.delivered.append(seq)

    def check(self) -> None:
        assert self.delivered == sorted(set(self.delivered)), "once, and in order"
        assert not self.missed & set(self.delivered)
        assert set(self.written) == set(self.delivered) | self.missed | self.deleted


@pytest.mark.parametrize("seed", range(40))
async def test_every_record_is_relayed_once_or_accounted_for(seed: int) -> None:
    world = World()
    await world.open()
    config = TopicConfig(durability=Durability.DISK, cap_records=CAP)
    await world.engine.put_topic("t", config)
    history = History(world=world, rng=random.Random(seed))
    for _ in range(40):
        step = history.rng.choice(
            [history.write, history.write, history.delete, history.die_somewhere, history.die_somewhere]
            + [history.consume]
        )
        await step()
    await history.relay().run(once=True)
    await history.consume()
    history.check()
    await world.engine.close()
