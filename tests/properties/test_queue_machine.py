"""Producers, consumers, a database and a collector on one queue. Each may crash between any two calls.

After every step: acknowledged records are readable (I1), only produced records appear (I2), sequences are
dense and each producer's records keep their order (I3), no record is queued twice (I4), and a superseded
consumer has no effect (I5).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.buffer.doubles import MANIFEST, ScriptedStore, once

from penstock.buffer import (
    Consumer,
    ConsumerConfig,
    FencedError,
    Producer,
    ProducerConfig,
    WriteHandle,
)
from penstock.buffer import errors as buffer_errors
from penstock.buffer import manifest as m
from penstock.buffer.batch import decode_batch
from penstock.errors import OutcomeUnknown, PenstockError
from penstock.metrics import Registry
from penstock.objects import Version
from penstock.objects.memory import MemoryStore
from penstock.objects.store import Data
from penstock.testing import ManualClock

T = TypeVar("T")
PRODUCERS = 3


class ProcessStore(ScriptedStore):
    """One process's connection to the shared store. Cutting it stops only that process."""

    def __init__(self, shared: MemoryStore, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self._shared = shared
        self._entries = shared._entries

    def _write(self, key: str, data: Data) -> Version:
        return self._shared._write(key, data)

    def cut(self, op: str, key_part: str, *, applied: bool) -> None:
        """Make the next such call never return. The caller chooses whether it reaches the store."""
        forever = asyncio.Event()

        def die(called: str, key: str) -> PenstockError | None:
            if called == op and key_part in key:
                raise asyncio.CancelledError
            return None

        if applied:
            self.after = die
        else:
            self.gate = lambda called, key: forever if called == op and key_part in key else None


@dataclass
class Call:
    """One `produce` call: its producer, its records, and its outcome if the process lived to see it."""

    producer: int
    records: list[bytes]
    handle: WriteHandle


@dataclass
class Database:
    """The application's database: rows and the position, stored in one transaction."""

    rows: list[bytes] = field(default_factory=list)
    position: int | None = None


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.rng = random.Random(5)
        self.registry = Registry()
        self.shared = MemoryStore(clock=self.clock)
        self.calls: list[Call] = []
        self.database = Database()
        self.made = 0
        self.producers = [self.run(self.new_producer()) for _ in range(PRODUCERS)]
        self.consumer: Consumer | None = None
        self.superseded: list[Consumer] = []

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Run `work` to its end while time passes."""

        async def with_time() -> T:
            task = asyncio.ensure_future(work)
            for _ in range(400):
                await self.clock.advance(0.05)
                if task.done():
                    break
            return await asyncio.wait_for(task, 1)

        return self.loop.run_until_complete(with_time())

    async def new_producer(self) -> tuple[Producer, ProcessStore]:
        store = ProcessStore(self.shared, self.clock)
        config = ProducerConfig(store=store, flush_interval="1h", flush_size_bytes=40)
        return Producer(config, self.clock, rng=self.rng, registry=self.registry), store

    @rule(who=st.integers(0, PRODUCERS - 1), count=st.integers(1, 4))
    def produce(self, who: int, count: int) -> None:
        records = [b"%d" % (self.made + n) for n in range(count)]
        self.made += count
        handle = self.run(self.producers[who][0].produce(records))
        self.calls.append(Call(who, records, handle))

    @rule(who=st.integers(0, PRODUCERS - 1))
    def flush(self, who: int) -> None:
        self.run(self.producers[who][0].flush())

    @rule(who=st.integers(0, PRODUCERS - 1), applied=st.booleans(), times=st.integers(1, 2))
    def lose_the_reply_of_an_append(self, who: int, applied: bool, times: int) -> None:
        producer, store = self.producers[who]
        hook = once(OutcomeUnknown("reply lost"), "cas", MANIFEST, times=times)
        if applied:
            store.after = hook
        else:
            store.before = hook
        self.run(producer.flush())
        store.after = store.before = lambda op, key: None

    @rule(
        who=st.integers(0, PRODUCERS - 1), op=st.sampled_from(["put", "cas", "none"]), applied=st.booleans()
    )
    def crash_a_producer(self, who: int, op: str, applied: bool) -> None:
        producer, store = self.producers[who]

        async def crash() -> None:
            store.cut(op, "ingest/", applied=applied)
            flushing = asyncio.ensure_future(producer.flush()) if op != "none" else None
            await self.clock.advance(1)
            doomed = [*producer._tasks, *([flushing] if flushing else [])]
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)

        self.loop.run_until_complete(crash())
        self.producers[who] = self.run(self.new_producer())

    @rule()
    def start_a_consumer(self) -> None:
        if self.consumer is not None:
            self.superseded.append(self.consumer)
        config = ConsumerConfig(store=ProcessStore(self.shared, self.clock), gc_enabled=False)
        self.consumer = self.run(
            Consumer.open(
                config, self.database.position, clock=self.clock, rng=self.rng, registry=self.registry
            )
        )

    @precondition(lambda self: self.consumer is not None)
    @rule(acked=st.booleans())
    def deliver(self, acked: bool) -> None:
        assert self.consumer is not None
        batch = self.run(self.consumer.next_batch())
        if batch is None:
            return
        assert batch.duplicate_of is None
        assert batch.gap_from is None
        assert batch.sequence == (-1 if self.database.position is None else self.database.position) + 1
        self.database.rows.extend(batch.entries)
        self.database.position = batch.sequence
        if acked:
            self.run(self.consumer.ack_through(batch.sequence))

    @precondition(lambda self: self.consumer is not None and self.database.position is not None)
    @rule()
    def acknowledge_what_is_stored(self) -> None:
        assert self.consumer is not None
        assert self.database.position is not None
        if self.consumer.acked != self.database.position:
            self.run(self.consumer.ack_through(self.database.position))

    @precondition(lambda self: self.superseded)
    @rule(data=st.data())
    def let_a_superseded_consumer_act(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.superseded))
        before = self.shared._entries[MANIFEST].data
        action = data.draw(st.sampled_from(["deliver", "ack", "collect"]))
        try:
            if action == "deliver":
                self.run(old.next_batch())
            elif action == "ack" and m.read_footer(before).entry_count:
                self.run(old.ack_through(m.first_sequence(before)))
            elif action == "collect":
                assert self.run(old.gc.collect()).deleted == ()
            fenced = False
        except FencedError:
            fenced = True
        except buffer_errors.BufferError:
            fenced = action != "deliver"
        assert fenced or action != "deliver"
        assert self.shared._entries[MANIFEST].data == before

    @precondition(lambda self: self.consumer is not None)
    @rule()
    def collect_garbage(self) -> None:
        assert self.consumer is not None
        self.clock.jump_wall(1_200_000)
        self.run(self.consumer.gc.collect())

    def queued(self) -> list[tuple[int, list[bytes]]]:
        raw = self.shared._entries[MANIFEST].data if MANIFEST in self.shared._entries else m.EMPTY_MANIFEST
        return [
            (e.sequence, decode_batch(memoryview(self.shared._entries[e.location].data)).to_list())
            for e in m.decode_manifest(raw).entries
        ]

    @invariant()
    def the_queue_keeps_its_promises(self) -> None:
        stored = self.database.position if self.database.position is not None else -1
        ahead = [record for sequence, records in self.queued() if sequence > stored for record in records]
        visible = [*self.database.rows, *ahead]
        assert len(visible) == len(set(visible)), "queued or delivered twice"
        assert set(visible) <= {b"%d" % number for number in range(self.made)}, "never produced"
        for call in self.calls:
            outcome = call.handle.watcher.result()
            if outcome is not None and outcome.ok:
                at = visible.index(call.records[0])
                assert visible[at : at + len(call.records)] == call.records, "acknowledged and not there"
        for who in range(PRODUCERS):
            mine = [record for call in self.calls if call.producer == who for record in call.records]
            assert sorted(set(mine) & set(visible), key=mine.index) == [r for r in visible if r in set(mine)]

    def teardown(self) -> None:
        for producer, _ in self.producers:
            self.run(producer.close())
        self.start_a_consumer()
        assert self.consumer is not None
        while self.queued() and self.queued()[-1][0] > (self.database.position or -1):
            before = self.database.position
            self.deliver(acked=True)
            if self.database.position == before:
                break
        self.the_queue_keeps_its_promises()
        assert self.queued() == []
        for consumer in [self.consumer, *self.superseded]:
            self.run(consumer.release())
        self.loop.close()


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=200, stateful_step_count=40)
