"""A world on one seeded loop: producers, consumers that fence each other, wrong clocks, faulty storage.

Every write that reaches the store passes the `Watchtower`, which checks the invariants of that moment.
`World.check_totals` checks the invariants of the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from penstock.buffer import (
    BufferError,
    Consumer,
    ConsumerConfig,
    FencedError,
    OutcomeUnknown,
    Producer,
    ProducerConfig,
    StaleTransaction,
    Transaction,
    append_batches,
    store_batch,
)
from penstock.buffer import manifest as manifests
from penstock.buffer.upload import WriteHandle
from penstock.errors import PenstockError
from penstock.metrics import Registry
from penstock.objects import Blob, ByteRange, Data, MemoryStore, ObjectInfo, Version
from penstock.testing import FaultPlan, FaultyStore, ListingJournal, SimClock, Simulation

MANIFEST = "ingest/manifest"
HOUR_MS = 3_600_000
GC_INTERVAL_S = 20.0
LAST_GC_INTERVAL_S = 600.0
GRACE_S = 30.0


class Watchtower:
    """The shared store, with the invariants that hold between any two writes."""

    def __init__(self, inner: MemoryStore) -> None:
        self.inner = inner
        self.now: dict[str, bytes] = {}
        self.violations: list[str] = []

    def seen(self, key: str, data: bytes, owner_epoch: int | None) -> None:
        if key == MANIFEST:
            self._check_manifest(self.now.get(MANIFEST, manifests.EMPTY_MANIFEST), data, owner_epoch)
        self.now[key] = data

    def must(self, holds: bool, violation: str) -> None:
        """Record a violation for the end: an exception would only stop the writing task."""
        if not holds:
            self.violations.append(violation)

    def _check_manifest(self, old_raw: bytes, new_raw: bytes, owner_epoch: int | None) -> None:
        old, new = manifests.decode_manifest(old_raw), manifests.decode_manifest(new_raw)
        self.must(new.footer.next_sequence >= old.footer.next_sequence, "I3: numbers went back")
        self.must(new.footer.epoch >= old.footer.epoch, "I5: the epoch went back")
        before = {entry.sequence: entry for entry in old.entries}
        after = {entry.sequence: entry for entry in new.entries}
        for sequence, entry in after.items():
            self.must(before.get(sequence, entry) == entry, f"I3: entry {sequence} changed")
            new_number = sequence in before or sequence >= old.footer.next_sequence
            self.must(new_number, f"I3: {sequence} came back")
            self.must(entry.location in self.now, f"I6: {entry.location} is referenced, but not there")
        locations = Counter(entry.location for entry in new.entries)
        self.must(len(locations) == len(new.entries), f"I4: appended twice: {locations}")
        if before.keys() - after.keys():
            self.must(owner_epoch == old.footer.epoch, "I5: dequeued under an epoch that is not the writer's")

    def gone(self, keys: Iterable[str]) -> None:
        referenced = {
            e.location
            for e in manifests.decode_manifest(self.now.get(MANIFEST, manifests.EMPTY_MANIFEST)).entries
        }
        for key in keys:
            self.must(key not in referenced, f"I6: {key} was deleted while the manifest names it")
            self.now.pop(key, None)


class Window:
    """One actor's view of the shared store, which reports the writer to the watchtower."""

    url = "memory://world"

    def __init__(self, tower: Watchtower) -> None:
        self.tower = tower
        self.inner = tower.inner
        self.epoch: Callable[[], int] | None = None

    def _seen(self, key: str, data: Data) -> None:
        raw = bytes(data) if isinstance(data, bytes | bytearray | memoryview) else b"".join(data)
        self.tower.seen(key, raw, self.epoch() if self.epoch else None)

    async def get(self, key: str, byte_range: ByteRange | None = None) -> Blob:
        return await self.inner.get(key, byte_range)

    async def get_if_changed(self, key: str, version: Version) -> Blob | None:
        return await self.inner.get_if_changed(key, version)

    async def head(self, key: str) -> ObjectInfo:
        return await self.inner.head(key)

    async def list(self, prefix: str) -> list[ObjectInfo]:
        return await self.inner.list(prefix)

    async def put(self, key: str, data: Data) -> Version:
        version = await self.inner.put(key, data)
        self._seen(key, data)
        return version

    async def put_if_absent(self, key: str, data: Data) -> Version:
        version = await self.inner.put_if_absent(key, data)
        self._seen(key, data)
        return version

    async def put_if_match(self, key: str, data: Data, version: Version) -> Version:
        written = await self.inner.put_if_match(key, data, version)
        self._seen(key, data)
        return written

    async def delete_many(self, keys: Iterable[str]) -> dict[str, PenstockError]:
        listed = list(keys)
        self.tower.gone(listed)
        return await self.inner.delete_many(listed)

    async def close(self) -> None:
        pass


class Database:
    """A database that commits rows and the sequence atomically, for exactly-once processing."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.sequence: int | None = None

    def apply(self, sequence: int, rows: list[bytes]) -> None:
        if self.sequence is not None and sequence <= self.sequence:
            return  # a consumer that is about to learn it was fenced, or one that resumed a step behind
        expected = 0 if self.sequence is None else self.sequence + 1
        assert sequence == expected, f"I3: {sequence} delivered where {expected} was due"
        self.rows.extend(rows)
        self.sequence = sequence


class World:
    """The state of one run."""

    def __init__(self, sim: Simulation, plan: FaultPlan) -> None:
        self.sim = sim
        self.plan = plan
        self.tower = Watchtower(MemoryStore(clock=sim.clock()))
        self.journal = ListingJournal()
        self.database = Database()
        self.produced: set[bytes] = set()
        self.acked: set[bytes] = set()
        self.refused: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self.stores: list[FaultyStore] = []
        self.fenced = 0
        self.committed = 0
        self.repeated = 0
        self.reuploads = 0.0
        self.collected = 0.0

    def window(self, name: str, clock: SimClock) -> tuple[FaultyStore, Window]:
        view = Window(self.tower)
        rng = self.sim.child_rng(f"store of {name}")
        store = FaultyStore(view, clock=clock, rng=rng, plan=self.plan, journal=self.journal)
        self.stores.append(store)
        return store, view

    async def produce(self, name: str, skew_ms: int, calls: int) -> None:
        """Run a producer until it closes, or crashes at any point."""
        rng = self.sim.child_rng(name)
        clock = self.sim.clock(skew_ms)
        registry = Registry()
        config = ProducerConfig(
            store="memory://", flush_interval=rng.choice(["5ms", "100ms", "1s"]), append_deadline="5m"
        )
        store, _ = self.window(name, clock)
        producer = Producer(config, clock, store, rng=rng, registry=registry)
        watching: list[asyncio.Task[None]] = []
        for number in range(calls):
            records = [f"{name}.{number}.{part}".encode() for part in range(rng.randint(1, 3))]
            self.produced.update(records)
            handle = await producer.produce(records, name.encode())
            watching.append(asyncio.get_running_loop().create_task(self._watch(handle, records)))
            await clock.sleep(rng.choice([0.0, 0.0, 0.01, 0.2, 5.0]))
        if rng.random() < 0.3:
            self.sim.trace(f"{name} crashes")
            for task in [*producer._tasks, *watching]:
                task.cancel()
        else:
            try:
                await producer.close()
            except BufferError as error:
                self.sim.trace(f"{name} closed with {type(error).__name__}")
            await asyncio.gather(*watching)
        self.reuploads += registry.value("buffer.reupload_total")

    async def transact(self, name: str, skew_ms: int, versions: int) -> None:
        """Run a query that commits one version after the other, and repeats a version until it is confirmed.

        It crashes in the middle of anything and repeats versions that were reported as done. Each version
        is in the queue once. Every run stores its records again.
        """
        rng = self.sim.child_rng(name)
        for version in range(versions):
            records = [f"{name}.{version}.{part}".encode() for part in range(rng.randint(2, 4))]
            self.produced.update(records)
            told = False
            while not told or rng.random() < 0.2:
                run = asyncio.get_running_loop().create_task(self._commit(name, skew_ms, version, records))
                if rng.random() < 0.3:
                    await asyncio.wait([run], timeout=rng.choice([0.01, 0.1, 1.0, 60.0]))
                    if run.cancel():
                        self.sim.trace(f"{name} crashes in {version}")
                await asyncio.wait([run])
                repeated = None if run.cancelled() else run.result()
                if repeated is not None:
                    self.tower.must(repeated or not told, f"I12: {name} has committed {version} twice")
                    self.repeated += repeated
                    told = True
            self.committed += 1
            self.acked.update(records)
            await asyncio.sleep(rng.choice([0.0, 0.2, 5.0]))

    async def _commit(self, name: str, skew_ms: int, version: int, records: list[bytes]) -> bool | None:
        """Run once, as a new process would. Return None after an error."""
        rng = self.sim.child_rng(f"{name}.{version}.{len(self.stores)}")
        clock = self.sim.clock(skew_ms)
        store, _ = self.window(f"{name}.{len(self.stores)}", clock)
        registry = Registry()
        try:
            halves = (records[: len(records) // 2], records[len(records) // 2 :])
            stored = [await store_batch(store, "ingest", half, clock=clock, rng=rng) for half in halves]
            appended = await append_batches(
                ProducerConfig(store="memory://", append_deadline="5m"),
                stored,
                Transaction(app=name, version=version),
                store=store,
                clock=clock,
                rng=rng,
                registry=registry,
            )
        except BufferError as error:
            self.sim.trace(f"{name} failed in {version} with {type(error).__name__}")
            self.tower.must(not isinstance(error, StaleTransaction), f"I12: {error}")
            return None
        self.reuploads += registry.value("buffer.reupload_total")
        self.sim.trace(f"{name} committed {version}: {appended}")
        return appended.repeated

    async def _watch(self, handle: WriteHandle, records: list[bytes]) -> None:
        try:
            outcome = await handle.watcher.await_durable()
        except OutcomeUnknown:
            self.unknown.update(records)
        except BufferError as error:
            self.sim.trace(f"refused {records[0]!r}: {type(error).__name__}")
            self.refused.update(records)
        else:
            self.sim.trace(f"acked {records[0]!r} as {outcome.sequence}")
            self.acked.update(records)

    async def consume(self, name: str, skew_ms: int, until_s: float | None) -> None:
        """Run a consumer until its time ends, it is fenced, or (without a time) the queue is empty."""
        rng = self.sim.child_rng(name)
        clock = self.sim.clock(skew_ms)
        registry = Registry()
        config = ConsumerConfig(
            store="memory://",
            gc_interval=GC_INTERVAL_S if until_s is not None else LAST_GC_INTERVAL_S,
            gc_grace_period=GRACE_S,
            prefetch=rng.choice([0, 1, 3]),
            retry_deadline="5m",
        )
        store, view = self.window(name, clock)
        consumer = Consumer(config, store, clock=clock, rng=rng, registry=registry)
        view.epoch = lambda: consumer.epoch
        try:
            await self._initialize(consumer)
            await self._deliver(consumer, clock, rng.random, until_s)
            if until_s is None:
                await consumer.flush()
                # The newest name may lie an hour ahead; past that and the grace, two periods must do.
                await clock.sleep(HOUR_MS / 1000 + GRACE_S + 2 * LAST_GC_INTERVAL_S + 60)
            if until_s is None or rng.random() < 0.5:
                await consumer.close()
        except FencedError:
            self.fenced += 1
            self.sim.trace(f"{name} is fenced")
        except BufferError as error:
            self.tower.must(until_s is not None, f"I14: no faults are left, but {error!r}")
            self.sim.trace(f"{name} gives up on {type(error).__name__}")
        await consumer.release()
        self.collected += registry.value("buffer.gc_files_deleted")

    async def _initialize(self, consumer: Consumer) -> None:
        await consumer.initialize(self.database.sequence)
        self.sim.trace(f"epoch {consumer.epoch}")

    async def _deliver(
        self, consumer: Consumer, clock: SimClock, draw: Callable[[], float], until_s: float | None
    ) -> None:
        while until_s is None or clock.monotonic() < until_s:
            batch = await consumer.next_batch()
            if batch is None:
                if until_s is None:
                    return
                await clock.sleep(1.0)
                continue
            await clock.sleep(draw() * 0.5)
            self.database.apply(batch.sequence, batch.entries)
            if draw() < 0.5:
                await consumer.ack(batch.sequence)
                if draw() < 0.5:
                    await consumer.flush()
            else:
                await consumer.ack_through(batch.sequence)

    def check_totals(self) -> None:
        """Check that produced = delivered + refused + unknown, and that nothing is duplicated."""
        assert not self.tower.violations, self.tower.violations
        counts = Counter(self.database.rows)
        rows = set(counts)
        assert all(count == 1 for count in counts.values()), f"I4: {[r for r, n in counts.items() if n > 1]}"
        assert self.acked <= rows, f"I1: acknowledged and lost: {sorted(self.acked - rows)}"
        assert rows <= self.produced, f"I2: never produced: {sorted(rows - self.produced)}"
        assert not rows & self.refused, f"I4: refused, yet delivered: {sorted(rows & self.refused)}"
        left = [key for key in self.tower.now if key.endswith(".batch")]
        assert not left, f"I7: not collected: {left}"
