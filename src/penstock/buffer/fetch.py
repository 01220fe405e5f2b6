"""From an entry of the queue to its records: a stateless handle that any task or process may share.

`Prefetcher` fetches ahead of delivery: the next few batches, bounded in number and in bytes.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from penstock import errors
from penstock.buffer.batch import decode_batch
from penstock.buffer.errors import BatchMissing, SerializationError, StorageError, storage_error
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest import Entry, Metadata
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.codec import Block
from penstock.ids import SYSTEM_RNG
from penstock.objects import BucketNotFound, ByteRange, ObjectStore
from penstock.retry import RetryPolicy, retry
from penstock.units import format_size

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


class Prefetcher:
    """Keeps tasks for the batches that will be asked for next, in that order.

    A failed fetch is forgotten when it is taken, so that asking again tries again.
    """

    def __init__(self, fetcher: FetchHandle, *, ahead: int, bytes_max: int) -> None:
        self._fetcher = fetcher
        self._ahead = ahead
        self._bytes_max = bytes_max
        self._tasks: deque[tuple[int, asyncio.Task[ConsumedBatch]]] = deque()
        self._usual_bytes: int | None = None  # of one batch, by those seen last; None until one is known

    def plan(self, upcoming: Sequence[BatchDescriptor]) -> None:
        """Start fetching `upcoming` (in order, the first is wanted now) as far as the bounds allow."""
        if self._tasks and (not upcoming or self._tasks[0][0] != upcoming[0].sequence or self._head_failed()):
            self.cancel()
        for descriptor in upcoming[len(self._tasks) : self._ahead + 1]:
            if self._tasks and not self._has_room():
                return
            task = asyncio.get_running_loop().create_task(self._fetcher.fetch(descriptor))
            self._tasks.append((descriptor.sequence, task))

    def _head_failed(self) -> bool:
        """A fetch ahead of time that failed is no news by now: it is tried again when it is wanted."""
        task = self._tasks[0][1]
        return task.done() and (task.cancelled() or task.exception() is not None)

    def _has_room(self) -> bool:
        """Whether one more fits: what waits is known, what is under way is taken to be of the usual size."""
        sizes = [
            len(task.result().block.data)
            for _, task in self._tasks
            if task.done() and not task.cancelled() and not task.exception()
        ]
        self._usual_bytes = max(sizes, default=self._usual_bytes)
        if self._usual_bytes is None:
            return False
        under_way = len(self._tasks) - len(sizes) + 1
        return sum(sizes) + under_way * self._usual_bytes <= self._bytes_max

    async def take(self) -> ConsumedBatch:
        """The first planned batch. A cancelled caller loses nothing: the fetch continues for the next one.

        Raises `StorageError` if the fetch was forgotten meanwhile.
        """
        sequence, task = self._tasks[0]
        try:
            batch = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            self._drop(task)
            if _caller_is_cancelled():
                raise
            # Not meant for the caller: taken for its own, it would end the caller's task without a word.
            raise StorageError(
                f"the consumer was closed or started anew while it fetched batch {sequence}"
            ) from None
        except BaseException:
            self._drop(task)
            raise
        self._usual_bytes = len(batch.block.data)
        return batch

    def taken(self) -> None:
        """The first batch was delivered, unless everything was forgotten meanwhile."""
        if self._tasks:
            self._tasks.popleft()

    def _drop(self, task: asyncio.Task[ConsumedBatch]) -> None:
        if self._tasks and self._tasks[0][1] is task:
            self.cancel()

    def cancel(self) -> None:
        """Forget everything that was fetched ahead."""
        while self._tasks:
            _, task = self._tasks.popleft()
            task.cancel()
            task.add_done_callback(_ignore_error)


def _caller_is_cancelled() -> bool:
    caller = asyncio.current_task()
    return caller is not None and caller.cancelling() > 0


def _ignore_error(task: asyncio.Task[ConsumedBatch]) -> None:
    if not task.cancelled():
        task.exception()
