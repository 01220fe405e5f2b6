"""The upload of a batch: its `produce` calls with their watchers, and the storage of its records.

`store_batch` stores records as a batch that is not in the queue yet. A task uploads it, and the task's driver
appends it with `append_batches`. The two run on different machines, so the value passed between them is small
and can be pickled. The records are in the store.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import pyarrow as pa

from penstock import errors
from penstock.buffer.batch import CompressionType, EncodedBatch, encode_batch
from penstock.buffer.errors import BufferError, InvalidInputError, StorageError, storage_error
from penstock.buffer.manifest import Metadata, NewEntry
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.codec import RecordChunk, as_binary_array
from penstock.errors import Rejected
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.limits import BATCH_BYTES_MAX
from penstock.objects import ObjectStore
from penstock.retry import RetryPolicy, retry

BATCH_WEIGHT_MAX = BATCH_BYTES_MAX - 64
"""The largest size of a batch that a consumer decodes with its default limit."""

FRAMING_BYTES = 8
"""Limit of the bytes of a record besides its data: its header and its entry in the length table."""

STALE_AFTER_S = 300.0
"""Half of the usual grace period. Collectors that do not know the floor use only the age, so a batch that
waited this long is stored again before it is referenced."""

INLINE_BYTES = 256 * 1024
"""Below this size, encoding costs less than passing it to a thread."""

StoredRecords: TypeAlias = Sequence[bytes] | pa.Array | pa.ChunkedArray | RecordChunk | Sequence[RecordChunk]
"""Records as a list, as Arrow, or in the encoder's own chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOutcome:
    """The result of a `produce` call: an error, or the position of its first record."""

    error: BufferError | None = None
    sequence: int | None = None
    start_index: int | None = None
    location: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class DurabilityWatcher:
    """The handle that reports the outcome of a `produce` call.

    The producer settles it once. It may be awaited any number of times. Cancelling a waiter affects neither
    the write nor other waiters.
    """

    __slots__ = ("_outcome", "_waiters")

    def __init__(self) -> None:
        self._outcome: WriteOutcome | None = None
        self._waiters: list[asyncio.Future[None]] | None = None

    def result(self) -> WriteOutcome | None:
        """Return the outcome, or None while it is pending."""
        return self._outcome

    async def await_durable(self) -> WriteOutcome:
        """Wait until the records are stored and in the queue. Raise the error if the call failed."""
        if self._outcome is None:
            waiter = asyncio.get_running_loop().create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if self._waiters is not None:
                    self._waiters.remove(waiter)
        outcome = self._outcome
        assert outcome is not None
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def settle(self, outcome: WriteOutcome) -> None:
        """Settle the watcher. Called once, by the producer that created it."""
        self._outcome = outcome
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteHandle:
    """One `produce` call: its watcher and the time stamped on its records."""

    watcher: DurabilityWatcher
    ingestion_time_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProduceCall:
    """One `produce` call without its records, which are kept separately for the encoder."""

    count: int
    record_bytes: int
    metadata: bytes
    ingestion_time_ms: int
    accepted_at: float
    watcher: DurabilityWatcher

    @property
    def size(self) -> int:
        """The size that counts against the flush size: record and metadata bytes, without framing."""
        return self.record_bytes + len(self.metadata)

    @property
    def weight(self) -> int:
        """The size in memory and in the block, including framing."""
        return self.size + FRAMING_BYTES * self.count


@dataclass(slots=True, kw_only=True)
class OpenBatch:
    """The batch that is being filled. It uses no I/O and no clock.

    Its calls are in order. Each has one metadata item; with `merge`, a run of equal ones shares an item.

    Its age is counted from `opened_at`, when it took its first call. The calls themselves may be older: they
    waited while uploads were slow, and are stored together.
    """

    ordinal: int
    opened_at: float = 0.0
    merge: bool = False
    calls: list[ProduceCall] = field(default_factory=list)
    metadata: list[Metadata] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    records: list[Sequence[bytes] | RecordChunk] = field(default_factory=list)
    count: int = 0
    size: int = 0
    record_bytes: int = 0
    weight: int = 0

    def add(self, call: ProduceCall, records: Sequence[bytes] | RecordChunk) -> None:
        """Add a call with its records: a chunk, or a few records that are joined with their neighbours."""
        if not (self.merge and self._repeats(call)):
            self.metadata.append(
                Metadata(
                    start_index=self.count, ingestion_time_ms=call.ingestion_time_ms, payload=call.metadata
                )
            )
        self.calls.append(call)
        self.records.append(records)
        self.starts.append(self.count)
        self.count += call.count
        self.size += call.size
        self.record_bytes += call.record_bytes
        self.weight += call.weight

    def fits(self, call: ProduceCall) -> bool:
        """Return whether the batch can still be decoded with this call in it."""
        return self.weight + call.weight <= BATCH_WEIGHT_MAX

    def is_due(self, now: float, flush_interval_s: float) -> bool:
        """Return whether the batch has been open for the flush interval."""
        return bool(self.calls) and now - self.opened_at >= flush_interval_s

    def _repeats(self, call: ProduceCall) -> bool:
        return bool(self.metadata) and (
            self.metadata[-1].ingestion_time_ms == call.ingestion_time_ms
            and self.metadata[-1].payload == call.metadata
        )

    def take_chunks(self) -> list[RecordChunk]:
        """Remove the records from the batch and return them as chunks. Join small neighbours."""
        chunks: list[RecordChunk] = []
        loose: list[bytes] = []
        for records in self.records:
            if isinstance(records, RecordChunk):
                if loose:
                    chunks.append(RecordChunk.of_list(loose))
                    loose = []
                chunks.append(records)
            else:
                loose.extend(records)
        if loose:
            chunks.append(RecordChunk.of_list(loose))
        self.records.clear()
        return chunks


class BatchUpload:
    """Encodes and stores a sealed batch. It keeps the bytes until the batch is in the queue."""

    __slots__ = (
        "_clock",
        "_compression",
        "_encoded",
        "_policy",
        "_prefix",
        "_rng",
        "_store",
        "_stored_at",
        "batch",
        "error",
        "finished",
        "location",
        "minted_ms",
        "sealed_at",
    )

    def __init__(
        self,
        batch: OpenBatch,
        *,
        store: ObjectStore,
        prefix: str,
        compression: CompressionType,
        policy: RetryPolicy,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.batch = batch
        self.location = ""
        self.minted_ms = -1
        self.sealed_at = clock.monotonic()
        self.finished = False
        self.error: BufferError | None = StorageError("the batch was not stored")
        self._store = store
        self._prefix = prefix
        self._compression = compression
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._encoded: EncodedBatch | None = None
        self._stored_at = 0.0

    @property
    def object_bytes(self) -> int:
        return 0 if self._encoded is None else self._encoded.size

    async def run(self, floor_ms: int) -> None:
        """Encode and store the batch. Keep an error in `error` for the committer instead of raising it.

        `error` is set until the batch is known to be stored, so a batch whose upload ended early is never
        referenced.
        """
        try:
            self._encoded = await self._encode()
            await self._put(floor_ms)
            self.error = None
        except errors.PenstockError as error:
            self.error = storage_error(error, f"storing a batch under {self._prefix}")
        except Exception as error:  # noqa: BLE001  a defect here or in a store fails only this batch
            self.error = StorageError(f"storing a batch of {self.batch.count} records failed: {error!r}")
        finally:
            self.finished = True

    async def _encode(self) -> EncodedBatch:
        chunks = self.batch.take_chunks()
        if self._compression is CompressionType.NONE or self.batch.record_bytes < INLINE_BYTES:
            return encode_batch(chunks, self._compression)  # uncompressed: encoded by the store's thread
        return await asyncio.to_thread(encode_batch, chunks, self._compression)

    async def _put(self, floor_ms: int) -> None:
        assert self._encoded is not None
        minted_ms = max(self._clock.now_ms(), floor_ms + 1)
        location = f"{self._prefix}/{mint_ulid(minted_ms, self._rng)}.batch"
        parts = self._encoded.parts
        started = self._clock.monotonic()
        await retry(lambda: self._store.put(location, parts), self._policy, clock=self._clock, rng=self._rng)
        # Set last: the name of an object that was not stored must never be referenced.
        self.minted_ms, self.location, self._stored_at = minted_ms, location, started

    def entry(self) -> NewEntry:
        return NewEntry(location=self.location, metadata=self.batch.metadata)

    def is_stale(self, floor_ms: int) -> bool:
        return self.minted_ms <= floor_ms or self._clock.monotonic() - self._stored_at > STALE_AFTER_S

    async def reupload(self, floor_ms: int) -> None:
        await self._put(floor_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """A stored batch object that is not in the queue yet, and its metadata for the manifest."""

    location: str
    minted_ms: int
    """The time in the name. If it is at or below the garbage floor, the object must be copied first."""
    record_count: int
    record_bytes: int
    size: int
    """The size of the object in bytes."""
    metadata: tuple[Metadata, ...]


async def store_batch(
    store: ObjectStore,
    prefix: str,
    records: StoredRecords,
    *,
    compression: CompressionType = CompressionType.NONE,
    metadata: bytes | Sequence[Metadata] = b"",
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random = SYSTEM_RNG,
    policy: RetryPolicy | None = None,
) -> StoredBatch:
    """Store records durably as one batch object below `prefix`. `append_batches` appends it to the queue.

    Without that append, the consumer deletes the object as garbage. `metadata` is one payload for all
    records, or items with their start indexes. Transient faults are retried. Raise `InvalidInputError` if
    there are no records or more than a batch can hold, and `StorageError`.
    """
    chunks = _chunks(records)
    count = sum(map(len, chunks))
    record_bytes = sum(chunk.record_bytes for chunk in chunks)
    if count == 0:
        raise InvalidInputError("a batch needs at least one record (an empty record is fine: [b''])")
    if record_bytes + FRAMING_BYTES * count > BATCH_WEIGHT_MAX:
        raise InvalidInputError(
            f"{record_bytes} bytes in {count} records are beyond the {BATCH_WEIGHT_MAX} bytes of a batch; "
            "split them into several"
        )
    items = _items(metadata, count, clock)
    batch = OpenBatch(ordinal=0, metadata=items, records=[*chunks], count=count, record_bytes=record_bytes)
    upload = BatchUpload(
        batch,
        store=store,
        prefix=prefix,
        compression=compression,
        policy=policy or RetryPolicy(),
        clock=clock,
        rng=rng,
    )
    await upload.run(floor_ms=-1)
    if upload.error is not None:
        raise upload.error
    return StoredBatch(
        location=upload.location,
        minted_ms=upload.minted_ms,
        record_count=count,
        record_bytes=record_bytes,
        size=upload.object_bytes,
        metadata=tuple(items),
    )


def _chunks(records: StoredRecords) -> list[RecordChunk]:
    if isinstance(records, RecordChunk):
        return [records]
    if isinstance(records, list | tuple) and records and isinstance(records[0], RecordChunk):
        return list(records)
    try:
        return [RecordChunk.of_array(as_binary_array(records))]
    except Rejected as error:
        raise InvalidInputError(str(error)) from error


def _items(metadata: bytes | Sequence[Metadata], count: int, clock: Clock) -> list[Metadata]:
    if isinstance(metadata, bytes):
        return [Metadata(start_index=0, ingestion_time_ms=clock.now_ms(), payload=metadata)]
    starts = [item.start_index for item in metadata]
    if starts != sorted(starts) or (starts and starts[-1] >= count):
        raise InvalidInputError(f"metadata of {count} records must have rising start indexes within them")
    return list(metadata)
