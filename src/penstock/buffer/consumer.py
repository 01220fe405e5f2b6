"""The consumer: delivers batches in queue order and takes their acks in that order. A queue has one owner."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType

from penstock import errors
from penstock.buffer.config import BadBatchPolicy, ConsumerConfig
from penstock.buffer.dequeue import Dequeuer
from penstock.buffer.errors import (
    BatchMissing,
    FencedError,
    InvalidInputError,
    OutOfOrderAck,
    SerializationError,
    storage_error,
)
from penstock.buffer.fetch import BatchDescriptor, ConsumedBatch, FetchHandle, Prefetcher
from penstock.buffer.gc import GarbageCollector
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest import Entry, EntryIndex
from penstock.buffer.manifest_file import ManifestFile
from penstock.buffer.side_objects import DeadLetter, store_dead_letter
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG
from penstock.metrics import Registry
from penstock.objects import ObjectStore, ensure_conditional_writes, open_store
from penstock.retry import RetryPolicy, retry
from penstock.units import DurationLike, parse_duration

RECENT_LOCATIONS = 10_000
"""The number of locations that a consumer remembers, to detect one that was appended twice."""


_log = logging.getLogger(__name__)

ACKS_PER_DEQUEUE = 100
"""The acks that share one manifest write: an ack is cheap in memory and expensive in the manifest."""


class RecentLocations:
    """A bounded memory of location to sequence."""

    def __init__(self, known: dict[int, str]) -> None:
        self._sequences: OrderedDict[str, int] = OrderedDict()
        for sequence, location in known.items():
            self.see(location, sequence)

    def see(self, location: str, sequence: int) -> int | None:
        """Remember the location. Return its earlier sequence if it was seen under another one, else None."""
        earlier = self._sequences.get(location)
        if earlier is None:
            self._sequences[location] = sequence
            if len(self._sequences) > RECENT_LOCATIONS:
                self._sequences.popitem(last=False)
        return None if earlier == sequence else earlier


class Progress:
    """The position of a consumer: delivered and acknowledged sequences, and known locations.

    It does no I/O. Acks follow the order of delivery, so a gap in the numbering does not block the queue.
    """

    def __init__(self, last_acked: int | None) -> None:
        self.acked = last_acked
        self.handed_out = last_acked
        self._unacked: deque[int] = deque()
        self._skipped: set[int] = set()

    def describe(self, entry: Entry, seen: RecentLocations) -> BatchDescriptor:
        """Return the descriptor of an entry, with the gap before it or its duplicate, if any."""
        expected = None if self.handed_out is None else self.handed_out + 1
        return BatchDescriptor(
            sequence=entry.sequence,
            location=entry.location,
            metadata=entry.metadata,
            duplicate_of=seen.see(entry.location, entry.sequence),
            gap_from=expected if expected is not None and entry.sequence > expected else None,
        )

    def is_past(self, sequence: int) -> bool:
        """Return whether `sequence` has been delivered or acknowledged."""
        return self.handed_out is not None and sequence <= self.handed_out

    def hand_out(self, sequence: int) -> None:
        self.handed_out = sequence
        self._unacked.append(sequence)

    def skip(self, sequence: int) -> None:
        """Move past a batch that was set aside. It is acknowledged as soon as everything before it is."""
        self.hand_out(sequence)
        self._skipped.add(sequence)
        self._advance()

    def _advance(self) -> None:
        while self._unacked and self._unacked[0] in self._skipped:
            self.acked = self._unacked.popleft()
            self._skipped.discard(self.acked)

    def check_ack(self, sequence: int) -> None:
        """Raise `OutOfOrderAck` unless `sequence` is the oldest delivered sequence without an ack."""
        if not self._unacked:
            raise OutOfOrderAck(f"out-of-order ack of {sequence}: no delivered batch waits for an ack")
        if sequence != self._unacked[0]:
            raise OutOfOrderAck(
                f"out-of-order ack of {sequence}: the next to acknowledge is {self._unacked[0]}"
            )

    def ack(self, sequence: int) -> None:
        self.check_ack(sequence)
        self._unacked.popleft()
        self.acked = sequence
        self._advance()

    def check_ack_through(self, sequence: int) -> None:
        if self.acked is not None and sequence <= self.acked:
            raise OutOfOrderAck(
                f"out-of-order ack through {sequence}: acknowledged through {self.acked} already"
            )
        if self.acked is None and self._unacked and sequence < self._unacked[0]:
            raise OutOfOrderAck(
                f"out-of-order ack through {sequence}: the first that was delivered is {self._unacked[0]}"
            )

    def ack_through(self, sequence: int) -> int:
        """Acknowledge up to `sequence`. Return the number of sequences, from the first delivered one."""
        self.check_ack_through(sequence)
        before = self.acked
        if before is None:
            before = (self._unacked[0] if self._unacked else sequence) - 1
        while self._unacked and self._unacked[0] <= sequence:
            self._skipped.discard(self._unacked.popleft())
        self.acked = sequence
        if self.handed_out is None or self.handed_out < sequence:
            self.handed_out = sequence
        self._advance()
        return sequence - before


class Consumer:
    """Reads a queue in order. A new consumer fences every earlier one.

    For exactly-once processing, write the rows and `batch.sequence` in one transaction, acknowledge when that
    transaction is durable, and pass the stored sequence as `last_acked` after a restart.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        store: ObjectStore | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng
        self._owns_store = store is None and not isinstance(config.store, ObjectStore)
        self._store = store or open_store(config.store, deadline_s=config.retry_deadline_s)
        self._instruments = Instruments(registry)
        self._policy = RetryPolicy(deadline_s=config.retry_deadline_s)
        self._dequeuer = Dequeuer(
            ManifestFile(
                self._store,
                config.manifest_key,
                prefix=config.prefix,
                since_ms=clock.now_ms(),
                checks_dequeued=True,
            ),
            policy=self._policy,
            clock=clock,
            rng=rng,
            instruments=self._instruments,
        )
        self._fetcher = FetchHandle(
            self._store,
            batch_bytes_max=config.batch_bytes_max,
            policy=self._policy,
            clock=clock,
            rng=rng,
            instruments=self._instruments,
        )
        self._prefetcher = Prefetcher(self._fetcher, ahead=config.prefetch, bytes_max=config.prefetch_bytes)
        self._progress = Progress(None)
        self._seen = RecentLocations({})
        self._acks_since_dequeue = 0
        self._delivering = asyncio.Lock()
        self._gc_task: asyncio.Task[None] | None = None
        self.gc = GarbageCollector(
            config, queue=self._dequeuer, store=self._store, clock=clock, rng=rng, registry=registry
        )
        self.dead_letters: list[DeadLetter] = []

    @classmethod
    async def open(
        cls,
        config: ConsumerConfig,
        last_acked: int | None = None,
        *,
        store: ObjectStore | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry | None = None,
    ) -> Consumer:
        """Create a consumer and call `initialize(last_acked)`."""
        consumer = cls(config, store, clock=clock, rng=rng, registry=registry)
        try:
            await consumer.initialize(last_acked)
        except BaseException:
            await consumer.release()
            raise
        return consumer

    async def __aenter__(self) -> Consumer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, FencedError):
            await self.release()  # a newer owner took over: there is nothing left to write
        else:
            await self.close()

    def __len__(self) -> int:
        """The number of entries when the manifest was last read or written."""
        return self._dequeuer.length

    @property
    def epoch(self) -> int:
        """The epoch of this consumer. It grows when garbage is collected."""
        return self._dequeuer.epoch

    @property
    def acked(self) -> int | None:
        """The last acknowledged sequence."""
        return self._progress.acked

    async def initialize(self, last_acked: int | None = None) -> None:
        """Take over the queue and start after `last_acked` (None: at the earliest entry).

        Raise `StorageError` if the store cannot be used. With `strict_resume`, raise `InvalidInputError` if
        `last_acked` is beyond the end of the queue.
        """
        if last_acked is not None:
            _check_sequence("last_acked", last_acked)
        try:
            await retry(
                lambda: ensure_conditional_writes(self._store, self._config.prefix),
                self._policy,
                clock=self._clock,
                rng=self._rng,
            )
        except errors.PenstockError as error:
            raise storage_error(error, "opening the consumer") from error
        entries = await self._dequeuer.initialize()
        self._seen = RecentLocations(await self._dequeuer.known_dequeued())
        self._progress = Progress(last_acked)
        self._prefetcher.cancel()
        self._acks_since_dequeue = 0
        if last_acked is not None:
            await self._resume(last_acked, entries)
        if self._config.gc_enabled and (self._gc_task is None or self._gc_task.done()):
            self._gc_task = asyncio.get_running_loop().create_task(self.gc.run())

    async def _resume(self, last_acked: int, entries: EntryIndex) -> None:
        following = entries.footer.next_sequence
        if last_acked >= following or self._dequeuer.created:
            found = f"has assigned numbers only up to {following - 1}" if following else "did not exist"
            text = (
                f"resuming after {last_acked}, but {self._config.manifest_path} {found}: was the manifest "
                f"deleted? Entries up to {last_acked} will be skipped"
            )
            if self._config.strict_resume:
                raise InvalidInputError(text)
            _log.warning(text)
        if following:
            await self._dequeuer.dequeue(min(last_acked, following - 1))

    async def next_batch(self) -> ConsumedBatch | None:
        """Return the next batch, or None if the queue has no more.

        The position moves only when the batch is returned. After a failed or cancelled call, the next call
        returns the same batch. Raise `FencedError` (stop) or another `BufferError`.
        """
        async with self._delivering:
            while True:
                upcoming = await self._upcoming(self._config.prefetch + 1)
                if not upcoming:
                    return None
                self._prefetcher.plan(upcoming)
                try:
                    batch = await self._prefetcher.take()
                except (BatchMissing, SerializationError) as error:
                    if self._config.bad_batch_policy is BadBatchPolicy.RAISE:
                        raise
                    await self._set_aside(upcoming[0], error)
                    continue
                if self._progress.is_past(upcoming[0].sequence):
                    continue  # `ack_through` passed it during the fetch
                self._prefetcher.taken()
                self._deliver(upcoming[0])
                self._count_batch(batch)
                # The fetched batch may have a descriptor without its gap or duplicate.
                return replace(batch, descriptor=upcoming[0])

    async def _upcoming(self, limit: int) -> list[BatchDescriptor]:
        entries = await self._dequeuer.entries()
        return [
            self._progress.describe(entry, self._seen) if number == 0 else BatchDescriptor.of(entry)
            for number, entry in enumerate(entries.after(self._progress.handed_out, limit))
        ]

    async def batches(self, poll_interval: DurationLike = "100ms") -> AsyncIterator[ConsumedBatch]:
        """Iterate over batches indefinitely. Wait for `poll_interval` when the queue is empty."""
        poll_interval_s = parse_duration(poll_interval)
        while True:
            batch = await self.next_batch()
            if batch is None:
                await self._clock.sleep(poll_interval_s)
            else:
                yield batch

    async def next_descriptors(self, limit: int) -> list[BatchDescriptor]:
        """Return up to `limit` descriptors of batches, from one read of the manifest.

        The position moves immediately. If the caller loses a descriptor, only a new consumer that starts
        after the last acknowledged batch receives it again.
        """
        if type(limit) is not int:
            raise InvalidInputError(f"limit must be a whole number, not {limit!r}")
        if limit <= 0:
            return []
        async with self._delivering:
            entries = await self._dequeuer.entries()
            handed: list[BatchDescriptor] = []
            for entry in entries.after(self._progress.handed_out, limit):
                descriptor = self._progress.describe(entry, self._seen)
                self._deliver(descriptor)
                handed.append(descriptor)
            self._prefetcher.cancel()
        self._instruments.descriptors_handed_out.inc(len(handed))
        return handed

    async def entries(self) -> EntryIndex:
        """Return the current queue, for a caller that keeps its own position. Nothing counts as delivered.

        This takes one request; "not modified" transfers no bytes. Raise `FencedError`.
        """
        return await self._dequeuer.entries()

    async def dequeued(self) -> dict[int, str]:
        """Return the location of each recent sequence in the dequeued log.

        Only the first call sends a request: the consumer keeps track of its own dequeues.
        """
        return await self._dequeuer.known_dequeued()

    def fetch_handle(self) -> FetchHandle:
        """Return the handle that fetches descriptors. Tasks may share it. It does not notice fencing."""
        return self._fetcher

    async def fetch_descriptor(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """Fetch the batch of a descriptor."""
        batch = await self._fetcher.fetch(descriptor)
        self._count_batch(batch)
        return batch

    async def ack(self, sequence: int) -> None:
        """Acknowledge the oldest delivered batch that has no ack yet.

        Every hundredth ack removes the acknowledged entries from the queue. If that fails, the ack has no
        effect and may be repeated.
        """
        self._dequeuer.require_epoch()
        self._progress.check_ack(sequence)
        if self._acks_since_dequeue + 1 >= ACKS_PER_DEQUEUE:
            await self._dequeuer.dequeue(sequence)
            self._acks_since_dequeue = 0
        else:
            self._acks_since_dequeue += 1
        self._progress.ack(sequence)
        if self._progress.acked != sequence:
            # Batches set aside after it are now acknowledged too, and wait for a dequeue.
            self._acks_since_dequeue = max(1, self._acks_since_dequeue)
        self._instruments.acks.inc()

    async def ack_through(self, sequence: int) -> None:
        """Acknowledge everything up to `sequence` and remove it from the queue, in one manifest write.

        The caller guarantees that all of it was processed. Raise `OutOfOrderAck` if `sequence` is already
        acknowledged, and `InvalidInputError` if it does not exist yet.
        """
        _check_sequence("sequence", sequence)
        self._progress.check_ack_through(sequence)
        await self._dequeuer.dequeue(sequence)
        self._instruments.acks.inc(self._progress.ack_through(sequence))
        self._acks_since_dequeue = 0 if self._progress.acked == sequence else 1

    async def flush(self) -> None:
        """Remove all acknowledged entries from the queue. Write nothing if there are none."""
        self._dequeuer.require_epoch()
        acked = self._progress.acked
        if acked is None or not self._acks_since_dequeue:
            return
        await self._dequeuer.dequeue(acked)
        if self._progress.acked == acked:
            self._acks_since_dequeue = 0  # otherwise later acks wait for the next flush

    async def close(self) -> None:
        """Flush, then stop. If the consumer was never initialised, only release its store."""
        try:
            if self._dequeuer.initialised:
                await self.flush()
        finally:
            await self.release()

    async def release(self) -> None:
        """Stop without writing anything. Batches whose acks were not flushed are delivered again."""
        self._dequeuer.close()
        self._prefetcher.cancel()
        if self._gc_task is not None:
            self._gc_task.cancel()
            await asyncio.gather(self._gc_task, return_exceptions=True)
            self._gc_task = None
        if self._owns_store:
            await self._store.close()

    def _deliver(self, descriptor: BatchDescriptor) -> None:
        if descriptor.gap_from is not None:
            self._instruments.gaps.inc()
            _log.warning(
                "%s jumps from %d to %d", self._config.manifest_path, descriptor.gap_from, descriptor.sequence
            )
        if descriptor.duplicate_of is not None:
            self._instruments.duplicates.inc()
            _log.warning(
                "batch %d is the same object as batch %d", descriptor.sequence, descriptor.duplicate_of
            )
        self._progress.hand_out(descriptor.sequence)

    async def _set_aside(self, descriptor: BatchDescriptor, error: errors.PenstockError) -> None:
        """Record a bad batch durably, then move past it."""
        data: memoryview | None = None
        if not isinstance(error, BatchMissing):
            data = await self._fetcher.raw(descriptor)
        record = functools.partial(
            store_dead_letter,
            self._store,
            self._dequeuer.file.path,
            sequence=descriptor.sequence,
            location=descriptor.location,
            reason=str(error),
            data=data,
            now_ms=self._clock.now_ms(),
        )
        try:
            letter = await retry(record, self._policy, clock=self._clock, rng=self._rng)
        except errors.PenstockError as failure:
            raise storage_error(failure, f"setting batch {descriptor.sequence} aside") from failure
        self.dead_letters.append(letter)
        self._instruments.bad_batches.inc()
        _log.error("batch %d was set aside as %s: %s", descriptor.sequence, letter.record_key, error)
        if self._progress.is_past(descriptor.sequence):
            return  # `ack_through` passed it during that write
        self._progress.skip(descriptor.sequence)
        self._acks_since_dequeue += 1

    def _count_batch(self, batch: ConsumedBatch) -> None:
        instruments = self._instruments
        instruments.batches_collected.inc()
        instruments.entries_collected.inc(len(batch))
        instruments.bytes_collected.inc(batch.block.record_bytes)
        if batch.metadata:
            age_ms = self._clock.now_ms() - batch.metadata[-1].ingestion_time_ms
            instruments.consumer_lag.set(max(0, age_ms) / 1000)


def _check_sequence(name: str, value: int) -> None:
    if type(value) is not int or not 0 <= value < 2**64:
        raise InvalidInputError(f"{name} must be a sequence number, not {value!r}")
