"""A fault, or the death of the caller, at every object-store call of producers, consumers and the collector.

Two producers, a consumer, its successor and a garbage collector share one store in virtual time. A clean run
numbers the calls; then each call meets each fault that exists for it, and each call is the last of its
caller. Afterwards the store is quiet, a fresh consumer drains the queue, and the promises are checked.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest

from penstock.buffer import (
    Consumer,
    ConsumerConfig,
    FencedError,
    OutcomeUnknown,
    Producer,
    ProducerClosed,
    ProducerConfig,
    manifest,
)
from penstock.buffer.batch import decode_batch
from penstock.errors import OutcomeUnknown as LostAnswer
from penstock.errors import PenstockError
from penstock.ids import mint_ulid
from penstock.objects import MemoryStore
from penstock.testing import (
    FAULTS_OF,
    FaultKind,
    FaultPlan,
    FaultyStore,
    ListingJournal,
    Simulation,
    run_simulation,
)
from penstock.testing.fault_plan import StoreCall

GRACE_S = 10.0
HORIZON_S = 200_000.0
MANIFEST = "ingest/manifest"
SIDE_OBJECTS = {MANIFEST, f"{MANIFEST}.ledger", f"{MANIFEST}.floor"}
CRASH_BEFORE, CRASH_AFTER = "crash before the call", "crash after the call"
LOST_LATE = "applied, and a time-out long after"
KINDS = (*FaultKind, CRASH_BEFORE, CRASH_AFTER, LOST_LATE)
NAMES = itertools.count()


class MortalStore:
    """One actor's store. At the chosen call the actor dies: none of its calls returns any more.

    Or the answer to that call is lost, after so long a time that others have moved on.
    """

    def __init__(self, inner: FaultyStore, crash: tuple[int, str] | None) -> None:
        self.inner = inner
        self.url = inner.url
        self.died = asyncio.Event()
        self._crash = crash

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any) -> Any:
            if self.died.is_set():
                await asyncio.Event().wait()
            index, when = self._crash or (-1, "")
            mine = len(self.inner.calls) == index
            if mine and when == CRASH_BEFORE:
                self.inner.plan.draw(name, "", random.Random(0))  # it counts, so that nobody else dies at it
                await self._die()
            answer = await getattr(self.inner, name)(*args)
            if mine and when == CRASH_AFTER:
                await self._die()
            if mine and when == LOST_LATE and name.startswith("put_if"):
                await asyncio.sleep(12.0)  # the consumer has read, acknowledged and dequeued it by now
                raise LostAnswer(f"no answer to {name} {args[0]}")
            if self.died.is_set():
                await asyncio.Event().wait()
            return answer

        return call

    async def _die(self) -> None:
        self.died.set()
        await asyncio.Event().wait()


@dataclass
class Book:
    """The answers to the producers, and the database that the consumers write, which no fault touches."""

    produced: set[bytes] = field(default_factory=set)
    acked: set[bytes] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)
    unknown: set[bytes] = field(default_factory=set)
    acked_at_s: list[float] = field(default_factory=list)
    rows: list[tuple[int, bytes]] = field(default_factory=list)
    position: int | None = None
    owner: int = 0
    opened: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Per owner: when it began to take the queue over, and when it was told that it had."""
    complaints: list[str] = field(default_factory=list)

    def is_superseded(self, owner: int) -> bool:
        """Whether somebody took the queue over, from beginning to end, after this owner had it."""
        return any(began_s > self.opened[owner][1] for began_s, _ in self.opened.values())

    def commit(self, consumer: int, sequence: int, bodies: list[bytes]) -> None:
        """Rows and position in one step, by the newest owner only: the recipe's transaction."""
        if consumer != self.owner:
            raise FencedError("the database has a newer owner")
        self.rows += [(sequence, body) for body in bodies]
        self.position = sequence


@dataclass
class World:
    sim: Simulation
    plan: FaultPlan
    crash: tuple[int, str] | None
    store: MemoryStore
    book: Book = field(default_factory=Book)
    journal: ListingJournal = field(default_factory=ListingJournal)
    doors: list[MortalStore] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)
    calls: tuple[StoreCall, ...] = ()

    def door(self) -> MortalStore:
        rng = self.sim.child_rng(f"store {len(self.doors)}")
        faulty = FaultyStore(
            self.store, clock=self.sim.clock(), rng=rng, plan=self.plan, journal=self.journal
        )
        self.doors.append(MortalStore(faulty, self.crash))
        return self.doors[-1]

    def producer(self, door: MortalStore, name: str) -> Producer:
        # Every call is a batch of its own, uploaded beside its neighbours: they are committed in groups.
        config = ProducerConfig(store="memory://", flush_size_bytes=1, max_parallel_uploads=3)
        return Producer(config, self.sim.clock(), door, rng=self.sim.child_rng(name))

    async def consumer(self, door: object) -> tuple[Consumer, int]:
        """Claim the database, then the queue. Returns the consumer and its number as an owner."""
        config = ConsumerConfig(store="memory://", gc_enabled=False, gc_grace_period=GRACE_S, prefetch=1)
        self.book.owner += 1
        owner, position = self.book.owner, self.book.position
        rng, began_s = self.sim.child_rng(f"consumer {owner}"), self.sim.loop.time()
        consumer = await Consumer.open(config, position, store=door, clock=self.sim.clock(), rng=rng)
        self.consumers.append(consumer)
        self.book.opened[owner] = (began_s, self.sim.loop.time())
        return consumer, owner

    async def until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self.sim.loop.time()))


async def produce(world: World, producer: Producer, *names: str) -> None:
    book = world.book
    handles = []
    for name in names:
        bodies = [f"{name}/{part}".encode() for part in range(2)]
        book.produced.update(bodies)
        handles.append((bodies, await producer.produce(bodies, name.encode())))
    for bodies, handle in handles:
        try:
            await handle.watcher.await_durable()
        except OutcomeUnknown:
            book.unknown.update(bodies)
        except PenstockError:
            book.refused.update(bodies)
        else:
            book.acked.update(bodies)
            book.acked_at_s.append(world.sim.loop.time())


async def run_producer(world: World, door: MortalStore, name: str, first: int, second: int) -> None:
    producer = world.producer(door, name)
    await produce(world, producer, *(f"{name}{n}" for n in range(first)))
    if (
        name == "b"
    ):  # young enough to be in the queue's future, old enough to be collected at 20 s if it stalls
        await world.until(9.5)
        await produce(world, producer, "middle")
    await world.until(61.0)
    await produce(world, producer, *(f"{name}{n}" for n in range(first, first + second)))
    await world.until(70.0)
    await producer.close()


async def deliver_one(world: World, consumer: Consumer, owner: int) -> bool:
    batch = await consumer.next_batch()
    if batch is not None:
        world.book.commit(owner, batch.sequence, batch.entries)
        await consumer.ack(batch.sequence)
    return batch is not None


async def drain(world: World, consumer: Consumer, owner: int) -> None:
    while await deliver_one(world, consumer, owner):
        pass
    await consumer.flush()


async def retried(world: World, work: Callable[[], Awaitable[None]]) -> None:
    """What a supervisor does: start again after an error, stop when fenced. Faults end, so this ends."""
    for _ in range(5):
        try:
            await work()
        except FencedError:
            return
        except PenstockError:
            await asyncio.sleep(0.5)
        else:
            return
    world.book.complaints.append("an actor still failed after five starts")


async def run_first_consumer(world: World, door: MortalStore) -> None:
    consumer: Consumer | None = None
    owner = 0

    async def work() -> None:
        nonlocal consumer, owner
        consumer, owner = await world.consumer(door)
        for at_s in (0.05, 0.3, 5.0, 20.0):
            await world.until(at_s)
            await drain(world, consumer, owner)
        await consumer.gc.collect()
        await world.until(61.5)
        await deliver_one(world, consumer, owner)

    await retried(world, work)
    await world.until(68.0)
    # I5. Once the successor has started, whatever the old one asks for is refused.
    if consumer is not None and world.book.is_superseded(owner):
        await must_be_refused(world, "dequeue", consumer.ack_through((consumer.acked or 0) + 1))
        await must_be_refused(world, "read", consumer.next_batch())


async def must_be_refused(world: World, what: str, call: Awaitable[object]) -> None:
    try:
        answer = await call
    except PenstockError:
        return
    world.book.complaints.append(f"I5: the {what} of a superseded consumer was answered with {answer}")


async def run_second_consumer(world: World, door: MortalStore) -> None:
    await world.until(62.0)

    async def work() -> None:
        consumer, owner = await world.consumer(door)
        for at_s in (64.0, 71.0):
            await world.until(at_s)
            await drain(world, consumer, owner)
        await consumer.close()

    await retried(world, work)


async def alive(door: MortalStore, work: Awaitable[None]) -> None:
    """Until the work is done or its actor has died."""
    task = asyncio.ensure_future(work)
    death = asyncio.ensure_future(door.died.wait())
    await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
    death.cancel()
    if task.done():
        task.result()


async def scenario(sim: Simulation, plan: FaultPlan, crash: tuple[int, str] | None) -> World:
    world = World(sim, plan, crash, MemoryStore(f"faults-{next(NAMES)}", clock=sim.clock()))
    orphan = f"ingest/{mint_ulid(sim.clock().now_ms() - 1000, sim.rng)}.batch"
    await world.store.put(orphan, b"left by a producer that died")
    doors = [world.door() for _ in range(4)]
    await asyncio.gather(
        alive(doors[0], run_producer(world, doors[0], "a", 4, 2)),
        alive(doors[1], run_producer(world, doors[1], "b", 2, 1)),
        alive(doors[2], run_first_consumer(world, doors[2])),
        alive(doors[3], run_second_consumer(world, doors[3])),
    )
    world.calls = tuple(plan.calls)
    plan.quiet()
    for door in doors:
        await door.inner.settle()
    for consumer in world.consumers:
        await consumer.release()
    await check(world)
    return world


async def check(world: World) -> None:
    book, store = world.book, world.store
    assert not book.complaints, book.complaints

    # I3, I6: numbered without a hole (or `decode` raises), and every location is there and decodes.
    decoded = manifest.decode_manifest(bytes((await store.get(MANIFEST)).data))
    for entry in decoded.entries:
        decode_batch((await store.get(entry.location)).data)
    locations = [entry.location for entry in decoded.entries]
    assert len(set(locations)) == len(locations), "I4: a batch is in the queue twice"

    consumer, owner = await world.consumer(store)
    await drain(world, consumer, owner)
    sequences = sorted({sequence for sequence, _ in book.rows})
    assert sequences == list(range(len(sequences))), f"I3: {sequences}"
    assert [sequence for sequence, _ in book.rows] == sorted(sequence for sequence, _ in book.rows)
    seen = Counter(body for _, body in book.rows)
    assert not {body: n for body, n in seen.items() if n > 1}, "I4: delivered twice"
    assert book.acked <= set(seen), f"I1: acknowledged and lost: {sorted(book.acked - set(seen))}"
    assert set(seen) <= book.produced, "I2: delivered but never produced"
    assert not book.refused & set(seen), "a call was told 'not queued' and is in the queue"
    assert len(consumer) == 0

    # I7: two cycles after everything is dequeued and old, only the manifest and its side objects are left.
    for _ in range(2):
        await asyncio.sleep(GRACE_S + 1)
        await consumer.gc.collect()
    await consumer.close()
    left = {info.key for info in await store.list("ingest")} - SIDE_OBJECTS
    assert {key for key in left if "/probe-" not in key} == set(), "I7: garbage is left"


def run(plan: FaultPlan, crash: tuple[int, str] | None = None) -> World:
    plan.latency_s = (0.001, 0.02)
    # Past the grace period and the collection at 20 s, and over before the successor starts.
    plan.stall_s = (25.0, 40.0)
    return run_simulation(lambda sim: scenario(sim, plan, crash), seed=7, horizon_s=HORIZON_S)


@lru_cache
def clean_run() -> World:
    return run(FaultPlan.none())


def test_without_faults_everything_is_acknowledged_and_every_kind_of_call_is_made() -> None:
    world = clean_run()
    assert world.book.acked == world.book.produced
    assert {call.op for call in world.calls} == {
        "get", "get_if_changed", "put", "put_if_absent", "put_if_match", "list", "delete_many"
    }  # fmt: skip
    assert len(world.book.acked_at_s) == 10
    assert len(set(world.book.acked_at_s)) < 10, "batches that finish together are committed together"


def test_the_same_seed_makes_the_same_calls() -> None:
    def shape(world: World) -> list[tuple[str, bool]]:
        return [(call.op, call.key == MANIFEST) for call in world.calls]

    assert shape(run(FaultPlan.none())) == shape(clean_run())


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_any_store_call_loses_doubles_and_leaks_nothing(kind: FaultKind | str) -> None:
    unknown = runs = 0
    for index, op, key in clean_run().calls:
        if isinstance(kind, FaultKind) and kind not in FAULTS_OF[op]:
            continue
        if kind == LOST_LATE and not op.startswith("put_if"):
            continue
        plan = FaultPlan.at(index, kind) if isinstance(kind, FaultKind) else FaultPlan.none()
        try:
            world = run(plan, None if isinstance(kind, FaultKind) else (index, kind))
        except BaseException as error:
            error.add_note(f"{kind} at call {index}: {op} {key}")
            raise
        runs += 1
        unknown += len(world.book.unknown)
    assert runs
    assert unknown == 0, "one fault can always be found out: the ledger and a second look decide"


async def _stop_while_appending(sim: Simulation, stop: Callable[[Producer], Awaitable[None]]) -> World:
    """Stop a producer while its manifest write is under way; the write lands all the same."""
    plan = FaultPlan.none()
    world = World(sim, plan, None, MemoryStore("stop", clock=sim.clock()))
    door = world.door()
    producer = world.producer(door, "p")
    under_way = asyncio.Event()

    async def put_slowly(key: str, data: bytes) -> object:
        landing = asyncio.ensure_future(world.store.put_if_absent(key, data))
        under_way.set()
        await asyncio.sleep(10)
        return await landing

    door.put_if_absent = put_slowly
    outcome = asyncio.ensure_future(produce(world, producer, "x"))
    await under_way.wait()
    await stop(producer)
    await outcome
    return world


async def _cancel_the_close(producer: Producer) -> None:
    closing = asyncio.ensure_future(producer.close())
    await asyncio.sleep(1)
    closing.cancel()
    await asyncio.wait([closing])


def test_a_producer_stopped_during_its_manifest_write_says_that_the_outcome_is_unknown() -> None:
    world = run_simulation(lambda sim: _stop_while_appending(sim, _cancel_the_close), seed=1, horizon_s=100)
    assert world.book.unknown == world.book.produced, "it is in the queue: 'not queued' would be a lie"


def test_nothing_is_accepted_while_a_producer_closes() -> None:
    async def produce_too_late(producer: Producer) -> None:
        closing = asyncio.ensure_future(producer.close())
        await asyncio.sleep(1)
        with pytest.raises(ProducerClosed):
            await producer.produce([b"late"])
        await closing

    world = run_simulation(lambda sim: _stop_while_appending(sim, produce_too_late), seed=1, horizon_s=100)
    assert world.book.acked == world.book.produced
