"""From an entry of the queue to its records: a stateless handle that any task or process may share."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from penstock import errors
from penstock.buffer.batch import decode_batch
from penstock.buffer.errors import BatchMissing, SerializationError, storage_error
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest import Entry, Metadata
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.codec import Block
from penstock.ids import SYSTEM_RNG
from penstock.objects import BucketNotFound, ByteRange, ObjectStore
from penstock.retry import RetryPolicy, retry
from penstock.units import format_size

__all__ = ["BatchDescriptor", "ConsumedBatch", "FetchHandle"]

INLINE_BYTES = 256 * 1024
"""Below this, decoding costs less than a hop to a thread."""

OBJECT_SLACK_BYTES = 1 << 20
"""How much longer than its block an object may be: the footer, and what zstd adds to the incompressible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """A batch in the queue, before anybody has read it: what to fetch, and what the producers said of it."""

    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    duplicate_of: int | None = None
    """An earlier sequence with the same location: some client appended it twice."""
    gap_from: int | None = None
    """The sequence that should have come here, when the queue jumps to this one."""
    shard: int | None = None

    @classmethod
    def of(cls, entry: Entry) -> BatchDescriptor:
        return cls(sequence=entry.sequence, location=entry.location, metadata=entry.metadata)


@dataclass(frozen=True, kw_only=True)
class ConsumedBatch:
    """The records of one batch with everything the queue knows about them."""

    descriptor: BatchDescriptor
    block: Block = field(repr=False)

    def __len__(self) -> int:
        return len(self.block)

    @property
    def sequence(self) -> int:
        return self.descriptor.sequence

    @property
    def location(self) -> str:
        return self.descriptor.location

    @property
    def metadata(self) -> tuple[Metadata, ...]:
        return self.descriptor.metadata

    @property
    def duplicate_of(self) -> int | None:
        return self.descriptor.duplicate_of

    @property
    def gap_from(self) -> int | None:
        return self.descriptor.gap_from

    @property
    def shard(self) -> int | None:
        return self.descriptor.shard

    @cached_property
    def entries(self) -> list[bytes]:
        """The records, each as its own `bytes`."""
        return self.block.to_list()

    def to_arrow(self) -> pa.BinaryArray:
        """The records as a `binary` array, without a Python object per record."""
        return self.block.to_arrow()

    def to_arrow_view(self) -> pa.Array:
        """The records as a `binary_view` array that shares the fetched bytes."""
        return self.block.to_arrow_view()


class FetchHandle:
    """Fetches and decodes batches. It does not notice fencing: that is the consumer's business."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        batch_bytes_max: int,
        policy: RetryPolicy,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random = SYSTEM_RNG,
        instruments: Instruments | None = None,
    ) -> None:
        self._store = store
        self._batch_bytes_max = batch_bytes_max
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._instruments = instruments or Instruments()

    async def fetch(self, descriptor: BatchDescriptor) -> ConsumedBatch:
        """The batch. Raises `BatchMissing`, `SerializationError`, or `StorageError`.

        A batch that does not decode is read once more: the bytes may have been cut short on the way.
        """
        started = self._clock.monotonic()
        try:
            block = await self._read(descriptor)
        except SerializationError:
            block = await self._read(descriptor)
        self._instruments.fetch_duration.observe(self._clock.monotonic() - started)
        return ConsumedBatch(descriptor=descriptor, block=block)

    async def raw(self, descriptor: BatchDescriptor) -> memoryview:
        """The object as it is stored, but never more of it than the cap and a little, to notice that."""
        most = ByteRange(start=0, length=self._batch_bytes_max + OBJECT_SLACK_BYTES + 1)
        try:
            blob = await retry(
                lambda: self._store.get(descriptor.location, most),
                self._policy,
                clock=self._clock,
                rng=self._rng,
            )
        except BucketNotFound as error:
            raise storage_error(error, f"fetching batch {descriptor.sequence}") from error
        except (errors.NotFound, errors.InvalidInput, errors.LimitExceeded) as error:
            # A name that no store accepts is a name under which nothing is stored.
            raise BatchMissing(
                f"batch {descriptor.sequence} at {descriptor.location} is in the queue but not in the store"
            ) from error
        except errors.PenstockError as error:
            raise storage_error(error, f"fetching batch {descriptor.sequence}") from error
        return blob.data

    async def _read(self, descriptor: BatchDescriptor) -> Block:
        data = await self.raw(descriptor)
        if len(data) > self._batch_bytes_max + OBJECT_SLACK_BYTES:
            raise SerializationError(
                f"batch {descriptor.sequence} at {descriptor.location} is larger than the cap of "
                f"{format_size(self._batch_bytes_max)} (max_batch_bytes)"
            )
        try:
            if len(data) < INLINE_BYTES:
                return decode_batch(data, bytes_max=self._batch_bytes_max)
            return await asyncio.to_thread(decode_batch, data, bytes_max=self._batch_bytes_max)
        except SerializationError as error:
            raise SerializationError(
                f"batch {descriptor.sequence} at {descriptor.location} is damaged: {error}"
            ) from error
