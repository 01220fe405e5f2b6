"""A fault, or the death of the writer, at every store call of appends under transactions.

A writer appends two versions, as a streaming query does: after an error or a crash it starts again, with
new objects, at the version that it has not heard the end of, and one version it repeats although it was done.
A consumer reads and dequeues everything there is, before or after any one of the writer's calls. Whatever
meets whatever, each record is delivered once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
from tests.crash.test_buffer_faults import CRASH_AFTER, CRASH_BEFORE, MortalStore

from penstock.buffer import (
    Consumer,
    ConsumerConfig,
    ProducerConfig,
    StaleTransaction,
    Transaction,
    append_batches,
    last_version,
    store_batch,
)
from penstock.errors import PenstockError
from penstock.metrics import Registry
from penstock.objects import MemoryStore
from penstock.testing import FAULTS_OF, FaultKind, FaultPlan, FaultyStore, Simulation, run_simulation
from penstock.testing.fault_plan import StoreCall

CONFIG = ProducerConfig(store="memory://")
VERSIONS = 2
REPEATED = 0
"""This one is done again although it was done: its commit did not reach the checkpoint."""
KINDS = (*(kind for kind in FaultKind if kind is not FaultKind.STALE_LIST), CRASH_BEFORE, CRASH_AFTER)
NAMES = itertools.count()


@dataclass
class World:
    sim: Simulation
    store: MemoryStore
    rows: list[bytes] = field(default_factory=list)
    position: int | None = None
    runs: int = 0
    calls: tuple[StoreCall, ...] = ()

    async def consume(self) -> None:
        """A life of a consumer: everything there is goes into the database and leaves the queue."""
        config = ConsumerConfig(store=self.store, gc_enabled=False, prefetch=0)
        clock, rng = self.sim.clock(), self.sim.child_rng("consumer")
        consumer = await Consumer.open(config, self.position, clock=clock, rng=rng, registry=Registry())
        while (batch := await consumer.next_batch()) is not None:
            self.rows += batch.entries
            self.position = batch.sequence
            await consumer.ack(batch.sequence)
        await consumer.close()

    async def commit(self, store: Any, version: int) -> bool:
        """One run of a micro-batch; True if it had been committed before."""
        self.runs += 1  # every run has names of its own for its objects
        clock, rng = self.sim.clock(), self.sim.child_rng(f"run {self.runs}")
        stored = [
            await store_batch(store, "ingest", records(version, part), clock=clock, rng=rng)
            for part in range(2)
        ]
        transaction = Transaction(app="query", version=version)
        done = await append_batches(
            CONFIG, stored, transaction, store=store, clock=clock, rng=rng, registry=Registry()
        )
        return done.repeated


def records(version: int, part: int) -> list[bytes]:
    return [f"{version}/{part}/{number}".encode() for number in range(2)]


class Beside:
    """The writer's store; a consumer acts beside one of its calls, and whatever the call came to."""

    def __init__(
        self, door: MortalStore, consume: Callable[[], Awaitable[None]], at: tuple[int, bool]
    ) -> None:
        self.door = door
        self.url = door.url
        self._consume = consume
        self._at = at

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            index, before = self._at
            mine = len(self.door.inner.calls) == index
            if mine and before:
                await self._consume()
            try:
                return await getattr(self.door, name)(*args)
            finally:
                if mine and not before:
                    await self._consume()

        return call


async def scenario(
    sim: Simulation, plan: FaultPlan, crash: tuple[int, str] | None, consumer_at: tuple[int, bool]
) -> World:
    world = World(sim, MemoryStore(f"transactions-{next(NAMES)}", clock=sim.clock()))
    faulty = FaultyStore(world.store, clock=sim.clock(), rng=sim.child_rng("faults"), plan=plan)
    version, repeats, clean = 0, 0, not plan.script and crash is None
    while version < VERSIONS:
        door = MortalStore(faulty, crash)
        writing = asyncio.ensure_future(world.commit(Beside(door, world.consume, consumer_at), version))
        death = asyncio.ensure_future(door.died.wait())
        await asyncio.wait([writing, death], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()
        if door.died.is_set():
            crash = None
            writing.cancel()
            await asyncio.wait([writing])  # a consumer may act before the writer is started again
            continue
        try:
            repeated = writing.result()
        except StaleTransaction:
            raise
        except PenstockError:
            continue
        if version == REPEATED and not repeats:
            repeats += 1
            continue
        assert repeated == (version == REPEATED) or not clean
        version += 1
    world.calls = tuple(plan.calls)
    await faulty.settle()
    await world.consume()
    expected = [r for version in range(VERSIONS) for part in range(2) for r in records(version, part)]
    assert Counter(world.rows) == Counter(expected)
    assert world.rows == expected, "I3: micro-batches are in the queue in their order"
    assert await last_version(CONFIG, "query", store=world.store) == VERSIONS - 1
    return world


def run(
    plan: FaultPlan, crash: tuple[int, str] | None = None, consumer_at: tuple[int, bool] = (-1, True)
) -> World:
    plan.stall_s = (400.0, 500.0)  # objects that waited this long are copied before they are referenced
    return run_simulation(lambda sim: scenario(sim, plan, crash, consumer_at), seed=3, horizon_s=200_000.0)


@lru_cache
def clean_calls() -> tuple[StoreCall, ...]:
    return run(FaultPlan.none()).calls


def test_without_faults_every_version_goes_in_once_wherever_the_consumer_acts() -> None:
    for index in range(len(clean_calls())):
        for before in (True, False):
            run(FaultPlan.none(), consumer_at=(index, before))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind).replace(" ", "-"))
def test_an_append_that_is_repeated_after_any_fault_goes_in_once(kind: FaultKind | str) -> None:
    runs = 0
    for index, op, key in clean_calls():
        if isinstance(kind, FaultKind) and kind not in FAULTS_OF[op]:
            continue
        # The consumer acts nowhere, or beside the faulty call or one of the next few.
        beside = [(index + later, before) for later in range(4) for before in (True, False)]
        for consumer_at in [(-1, True), *beside]:
            plan = FaultPlan.at(index, kind) if isinstance(kind, FaultKind) else FaultPlan.none()
            crash = None if isinstance(kind, FaultKind) else (index, kind)
            try:
                run(plan, crash, consumer_at)
            except BaseException as error:
                error.add_note(f"{kind} at call {index}: {op} {key}; consumer at {consumer_at}")
                raise
            runs += 1
    assert runs, "every kind of fault is met somewhere"
