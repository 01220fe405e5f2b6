"""Feeding a database from a queue: each batch once, even after a crash of any process.

1. The database stores the sequence of a batch and the name of its queue together with its rows, in one atomic
   step. There is no other state: a starting feed reads it and continues after it, or refuses to start on
   another queue.
2. A batch is acknowledged when its write is DURABLE, in the order of the queue. More batches are written
   meanwhile.
3. If the database has no room, the same batch is written again later. If the queue or the database has a
   newer owner, the feed stops with an error.
4. A record that the database refuses completely or partly is stored as a dead letter in
   `{manifest_path}.dead/records/{sequence, 20 digits}.json` before its batch is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeVar

import msgspec

from penstock import errors
from penstock.buffer import ConsumedBatch, Consumer, ConsumerConfig, Metadata, QueueReader, dead_sequences
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import Durability, Position, WriteHandle
from penstock.ids import SYSTEM_RNG
from penstock.metrics import Registry
from penstock.objects import ObjectStore, open_store
from penstock.retry import Backoff, RetryPolicy
from penstock.units import DurationLike, convert_units, seconds_of

T = TypeVar("T")

_log = logging.getLogger(__name__)
_FOREVER = RetryPolicy(floor_s=0.05, ceiling_s=5.0, deadline_s=math.inf)
"""The retry policy for transient errors, without a limit. Operators monitor the lag of a feed and stop it."""
_REPEATABLE = (errors.Unavailable, errors.Conflict, errors.OutcomeUnknown)
"""The transient errors of the queue. Every request to it can be repeated."""
_SET_BACK = (
    "Restore the newer copy of the queue, or a copy of the database that is as old as the queue; otherwise"
    " new records would be skipped"
)
_DEAD_LETTERS_LISTED = 100
"""The number of refused records that a report lists. It counts all of them."""


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record that the database cannot accept, with its index in the batch and the reason."""

    index: int
    reason: str
    stored_in_part: bool = False
    """Whether the rest of the record is in the write."""


SetAside: TypeAlias = Callable[[Sequence[RefusedRecord]], Awaitable[None]]
"""A function that durably stores refused records as dead letters of the queue. It may be called again."""


class FedDatabase(Protocol):
    """A database that a `Feed` can write to."""

    async def write_batch(
        self, records: Sequence[bytes], metadata: Sequence[bytes], position: Position, set_aside: SetAside
    ) -> WriteHandle:
        """Write the contents of the records and `position` in one atomic batch.

        `metadata` has one payload for each record. Invalid records are left out and passed to `set_aside`,
        which must return before the write begins; otherwise they could be lost. The write happens, with
        `position`, even if no record is left. Wait for room, or raise `Unavailable` without writing. The
        handle becomes DURABLE without another call.
        """
        ...

    async def stored_position(self) -> Position | None:
        """Return the last position that is durable in the database, or None."""
        ...

    async def sync(self) -> None:
        """Return when all previous writes are durable."""
        ...


class DeadLetterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A refused record: its index in the batch, the reason, and its bytes (base64 in the object)."""

    index: int
    reason: str
    stored_in_part: bool = False
    """Whether the database has the rest of the record, without the part that the reason describes."""
    data: bytes


class DeadLetterFile(msgspec.Struct, frozen=True, kw_only=True):
    """The records of one batch that the database refused."""

    sequence: int
    location: str
    recorded_at_ms: int
    records: list[DeadLetterRecord]


def dead_letters_key(manifest_key: str, sequence: int) -> str:
    """Return the key of the dead letters of a batch."""
    return f"{manifest_key}.dead/records/{sequence:020d}.json"


async def store_dead_letters(store: ObjectStore, manifest_key: str, file: DeadLetterFile) -> str:
    """Store the dead letters of a batch in one object, replacing an earlier attempt. Return its key."""
    key = dead_letters_key(manifest_key, file.sequence)
    await store.put(key, msgspec.json.encode(file))
    return key


def read_dead_letters(data: bytes) -> DeadLetterFile:
    """Decode an object of dead letters. Raise `Corrupt`."""
    try:
        return msgspec.json.decode(data, type=DeadLetterFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.Corrupt(f"not the dead letters of a batch: {error}") from None


class AdoptQueue(StrEnum):
    """How a new queue relates to the previous queue of the database."""

    MOVED = "moved"
    """The same queue at another address: continue after the stored sequence."""
    NEW = "new"
    """Another queue: read it from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedConfig:
    """The configuration of a feed: the queue and its polling. Raises `ConfigError`."""

    queue: ConsumerConfig
    adopt_queue: AdoptQueue | str | None = None
    """How to adopt the queue. Required once if the database was fed from a queue of another name."""
    poll_interval: DurationLike = "1s"
    """The interval of polls while the queue is empty. Each poll is one request that transfers no data."""

    poll_interval_s = seconds_of("poll_interval")

    def __post_init__(self) -> None:
        convert_units(self)
        if self.poll_interval_s <= 0:
            raise errors.ConfigError("poll_interval must be above 0")
        _ = self.adoption

    @property
    def adoption(self) -> AdoptQueue | None:
        try:
            return None if self.adopt_queue is None else AdoptQueue(self.adopt_queue)
        except ValueError:
            raise errors.ConfigError(
                f"adopt_queue must be 'moved' or 'new', not {self.adopt_queue!r}"
            ) from None


@dataclass(slots=True, kw_only=True)
class FeedReport:
    """The result of a run. `through` is the last sequence that is durable in the database."""

    through: int | None = None
    batches: int = 0
    records: int = 0
    """The number of records in durable batches, without the refused ones."""
    refused: int = 0
    stored_in_part: int = 0
    """The number of records that the database has only partly. They are also stored as dead letters."""
    letters: list[RefusedRecord] = field(default_factory=list)
    """The first refused records."""
    caught_up: bool = False
    """Whether the queue was empty at the last poll."""


@dataclass(slots=True, kw_only=True)
class _Offer:
    """A batch that was written and is not durable yet, without its bytes."""

    sequence: int
    records: int
    handle: WriteHandle


class Feed:
    """Moves the batches of one queue into one database. The caller closes the database."""

    def __init__(
        self,
        config: FeedConfig,
        database: FedDatabase,
        *,
        store: ObjectStore | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry | None = None,
        on_progress: Callable[[FeedReport], None] | None = None,
    ) -> None:
        self._config = config
        self._database = database
        self._owns_store = store is None and not isinstance(config.queue.store, ObjectStore)
        self._store = store or open_store(config.queue.store, deadline_s=config.queue.retry_deadline_s)
        self._clock = clock
        self._rng = rng
        self._registry = registry or Registry()
        self._refused = self._registry.counter(
            "feed.records_refused", "Records that the database refused, stored as dead letters."
        )
        self._in_part = self._registry.counter(
            "feed.records_stored_in_part", "Records that the database refused partly, stored as dead letters."
        )
        self._fed = self._registry.counter("feed.records", "Records that are durable in the database.")
        self._sequence = self._registry.gauge(
            "feed.sequence",
            "The last sequence of the queue that is durable in the database, or -1 if there is none.",
        )
        self._on_progress = on_progress or (lambda report: None)
        self._stop = asyncio.Event()
        self.queue_name = f"{self._store.url.rstrip('/')}/{config.queue.manifest_key}"
        """The name of the queue that the database stores."""
        self.report = FeedReport()

    def stop(self) -> None:
        """Stop once every written batch is durable and acknowledged."""
        self._stop.set()

    async def run(self, *, once: bool = False) -> FeedReport:
        """Feed until `stop`, or with `once` until the queue is empty.

        Transient errors are retried. Raise `ConfigError` before accessing the queue if the database was fed
        from another queue and this one is not adopted. Raise `Fenced` if another process has taken over the
        queue or the database, `FlushError` if the database stopped, and the queue's errors for damaged
        batches.
        """
        try:
            stored = await self._database.stored_position()
            self.report.through = self._start_after(stored)
            if not await self._retry_forever(functools.partial(self._continues, stored), on=_REPEATABLE):
                self.report.through = None
            self._sequence.set(-1 if self.report.through is None else self.report.through)
            consumer = await self._retry_forever(self._open, on=_REPEATABLE)
            try:
                await self._feed(consumer, once=once)
                await self._retry_forever(consumer.flush, on=_REPEATABLE)
            finally:
                await consumer.release()
        finally:
            if self._owns_store:
                await self._store.close()
        return self.report

    def _start_after(self, stored: Position | None) -> int | None:
        """Return the sequence to continue after. A position without a name belongs to this queue."""
        if stored is None or stored.source in ("", self.queue_name):
            return None if stored is None else stored.sequence
        adoption = self._config.adoption
        if adoption is None:
            raise errors.ConfigError(
                f"the database was fed from {stored.source}, up to batch {stored.sequence}, not from"
                f" {self.queue_name}. If that is the same queue at another address, adopt it as 'moved'"
                " (--adopt-queue moved) to continue after that batch; if it is another one, as 'new', to read"
                " it from its beginning"
            )
        _log.warning("the queue %s is adopted as %s in place of %s", self.queue_name, adoption, stored.source)
        return stored.sequence if adoption is AdoptQueue.MOVED else None

    async def _continues(self, stored: Position | None) -> bool:
        """Return whether the queue continues at the stored position, or False to read it from its beginning.

        Raise `Corrupt` before changing the queue if the queue or the database was replaced by an older copy.
        In the first case the queue would reuse numbers up to the position for new records, which the feed
        would skip. In the second case batches that the database no longer has have left the queue.
        """
        reader = QueueReader(self._store, self._config.queue.manifest_key, clock=self._clock)
        index = await reader.index()
        following = index.footer.next_sequence
        if stored is None or self.report.through is None:
            if index.first:
                _log.warning(
                    "%s begins at batch %d and the database is empty: batches 0 to %d left the queue"
                    " before this feed",
                    self.queue_name,
                    index.first,
                    index.first - 1,
                )
            return True
        last = stored.sequence
        if last >= following:
            raise errors.Corrupt(
                f"the database has batches of {self.queue_name} up to {last}, but the queue has assigned"
                f" numbers only up to {following - 1}: the queue was replaced by an older copy, or deleted"
                f" and created again. {_SET_BACK}"
            )
        left = await reader.dequeued()
        found = left.get(last) if last < index.first else index[last - index.first].location
        if stored.location and found is not None and found != stored.location:
            raise errors.Corrupt(
                f"batch {last} of {self.queue_name}, the last that the database has, was {stored.location},"
                f" and now {found} has this number: the queue was replaced by an older copy and written to"
                f" since. {_SET_BACK}"
            )
        missing = index.first - (last + 1)
        if missing > 0:  # a dead batch leaves the queue without a write to the database
            dead_letters = await dead_sequences(self._store, self._config.queue.manifest_key)
            missing -= sum(last < number < index.first for number in dead_letters)
        if missing <= 0:
            return True
        text = (
            f"the database has batches of {self.queue_name} up to {last}, but the queue begins at"
            f" {index.first}: {missing} batches after {last} were acknowledged and are in neither."
        )
        if self._config.adoption is AdoptQueue.NEW:
            _log.warning("%s The queue is adopted as new: these stay missing", text)
            return False
        raise errors.Corrupt(
            f"{text} The database was replaced by an older copy, or another consumer took them. Restore the"
            " newer copy of the database; or, to accept the gap, adopt the queue once as 'new'"
            " (--adopt-queue new)"
        )

    async def _open(self) -> Consumer:
        return await Consumer.open(
            self._config.queue,
            self.report.through,
            store=self._store,
            clock=self._clock,
            rng=self._rng,
            registry=self._registry,
        )

    async def _feed(self, consumer: Consumer, *, once: bool) -> None:
        """Write batches and acknowledge durable ones concurrently, until either task ends."""
        written: asyncio.Queue[_Offer | None] = asyncio.Queue()
        writing = asyncio.create_task(self._write_all(consumer, written, once=once))
        settling = asyncio.create_task(self._settle_all(consumer, written))
        try:
            await asyncio.wait((writing, settling), return_when=asyncio.FIRST_EXCEPTION)
            for task in (
                settling,
                writing,
            ):  # await the cause before its consequence
                if task.done():
                    await task
        finally:
            await cancel_and_wait(writing)
            await cancel_and_wait(settling)

    async def _write_all(
        self, consumer: Consumer, written: asyncio.Queue[_Offer | None], *, once: bool
    ) -> None:
        while not self._stop.is_set():
            batch = await self._unless_stopped(self._retry_forever(consumer.next_batch, on=_REPEATABLE))
            if self._stop.is_set() and batch is None:
                break  # it is unknown whether there was another one
            self._note(caught_up=batch is None)
            if batch is not None:
                offer = await self._unless_stopped(self._write(batch))
                if offer is None:
                    break
                written.put_nowait(offer)
            elif once:
                break
            else:
                await self._unless_stopped(self._clock.sleep(self._config.poll_interval_s))
        await self._database.sync()
        written.put_nowait(None)

    async def _write(self, batch: ConsumedBatch) -> _Offer:
        # A repeated object is an append that a client repeated, so its records are already in the database.
        records = [] if batch.duplicate_of is not None else batch.entries
        payloads = payload_per_record(batch.metadata, len(records))
        position = Position(batch.sequence, self.queue_name, batch.location)
        dead_letters: dict[int, RefusedRecord] = {}

        async def set_aside(refused: Sequence[RefusedRecord]) -> None:
            new = [one for one in refused if one.index not in dead_letters]
            if new:
                await self._set_aside(batch, [*dead_letters.values(), *new])
                dead_letters.update((one.index, one) for one in new)
                self._count(new)

        handle = await self._retry_forever(
            lambda: self._database.write_batch(records, payloads, position, set_aside)
        )
        lost = sum(not one.stored_in_part for one in dead_letters.values())
        return _Offer(sequence=batch.sequence, records=len(records) - lost, handle=handle)

    async def _set_aside(self, batch: ConsumedBatch, refused: Sequence[RefusedRecord]) -> None:
        file = DeadLetterFile(
            sequence=batch.sequence,
            location=batch.location,
            recorded_at_ms=self._clock.now_ms(),
            records=[
                DeadLetterRecord(
                    index=one.index,
                    reason=one.reason,
                    stored_in_part=one.stored_in_part,
                    data=bytes(batch.entries[one.index]),
                )
                for one in sorted(refused, key=lambda one: one.index)
            ],
        )
        queue = self._config.queue.manifest_key
        key = await self._retry_forever(lambda: store_dead_letters(self._store, queue, file), on=_REPEATABLE)
        first = file.records[0]
        _log.error(
            "batch %d: %d records were refused and stored in %s; record %d%s: %s",
            batch.sequence,
            len(file.records),
            key,
            first.index,
            ", stored in part" if first.stored_in_part else "",
            first.reason,
        )

    def _count(self, refused: Sequence[RefusedRecord]) -> None:
        in_part = sum(one.stored_in_part for one in refused)
        self._in_part.inc(in_part)
        self._refused.inc(len(refused) - in_part)
        self.report.stored_in_part += in_part
        self.report.refused += len(refused) - in_part
        self.report.letters += refused[: max(0, _DEAD_LETTERS_LISTED - len(self.report.letters))]

    async def _settle_all(self, consumer: Consumer, written: asyncio.Queue[_Offer | None]) -> None:
        while (offer := await written.get()) is not None:
            await offer.handle.wait(Durability.DURABLE)
            await self._retry_forever(functools.partial(consumer.ack, offer.sequence), on=_REPEATABLE)
            self._fed.inc(offer.records)
            self.report.through = offer.sequence
            self._sequence.set(self.report.through)
            self.report.batches += 1
            self.report.records += offer.records
            self._on_progress(self.report)

    def _note(self, *, caught_up: bool) -> None:
        if caught_up != self.report.caught_up:
            self.report.caught_up = caught_up
            self._on_progress(self.report)

    async def _retry_forever(
        self,
        operation: Callable[[], Awaitable[T]],
        *,
        on: tuple[type[errors.PenstockError], ...] = (errors.Unavailable,),
    ) -> T:
        """Run `operation` until it succeeds, retrying errors of `on`. After a stop, try at most once more."""
        backoff = Backoff(_FOREVER, clock=self._clock, rng=self._rng)
        while True:
            stopping = self._stop.is_set()
            try:
                return await operation()
            except on:
                if stopping:
                    raise
                await self._unless_stopped(backoff.pause())

    async def _unless_stopped(self, work: Coroutine[None, None, T]) -> T | None:
        return await unless_set(self._stop, work)


def payload_per_record(metadata: Sequence[Metadata], count: int) -> list[bytes]:
    """Return the payload of each record: that of the last item that starts at or before it, or none."""
    starts = [item.start_index for item in metadata]
    return [
        metadata[place - 1].payload if (place := bisect_right(starts, index)) else b""
        for index in range(count)
    ]


async def unless_set(stop: asyncio.Event, work: Coroutine[None, None, T]) -> T | None:
    """Return the result of `work`. If `stop` is set before it ends, cancel it and return None."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        await cancel_and_wait(working)
        await cancel_and_wait(stopping)


async def cancel_and_wait(task: asyncio.Task[T]) -> None:
    """Cancel a task whose result is not needed, and wait until it has ended."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, errors.PenstockError):
        await task
