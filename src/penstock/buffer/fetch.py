"""Fetching and decoding the batches of a queue.

`FetchHandle` is stateless, so any number of tasks may share it. `Prefetcher` fetches the next few batches
ahead of delivery, bounded in number and in bytes.
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
"""Below this size, decoding costs less than passing it to a thread."""

OBJECT_SLACK_BYTES = 1 << 20
"""Limit of the bytes that an object has besides its block: the footer, and the overhead of zstd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """A batch in the queue before it is fetched: its location, and the metadata of its producers."""

    sequence: int
    location: str
    metadata: tuple[Metadata, ...]
    duplicate_of: int | None = None
    """An earlier sequence with the same location, if a client appended it twice."""
    gap_from: int | None = None
    """The expected sequence, if the queue skips to this one."""
    shard: int | None = None

    @classmethod
    def of(cls, entry: Entry) -> BatchDescriptor:
        return cls(sequence=entry.sequence, location=entry.location, metadata=entry.metadata)


@dataclass(frozen=True, kw_only=True)
class ConsumedBatch:
    """The records of a batch, and its entry in the queue."""

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
        """Return the records, each as its own `bytes`."""
        return self.block.to_list()

    def to_arrow(self) -> pa.BinaryArray:
        """Return the records as a `binary` array, without a Python object per record."""
        return self.block.to_arrow()

    def to_arrow_view(self) -> pa.Array:
        """Return the records as a `binary_view` array that shares the fetched bytes."""
        return self.block.to_arrow_view()


class FetchHandle:
    """Fetches and decodes batches. It does not notice fencing; the consumer does."""

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
        """Fetch the batch. Raise `BatchMissing`, `SerializationError`, or `StorageError`.

        A batch that does not decode is read once more: the response may have been truncated.
        """
        started = self._clock.monotonic()
        try:
            block = await self._read(descriptor)
        except SerializationError:
            block = await self._read(descriptor)
        self._instruments.fetch_duration.observe(self._clock.monotonic() - started)
        return ConsumedBatch(descriptor=descriptor, block=block)

    async def raw(self, descriptor: BatchDescriptor) -> memoryview:
        """Fetch the stored object. Read one byte more than the limit allows, to detect a larger object."""
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
            # A name that the store refuses cannot name a stored object.
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
    """Fetches the next batches ahead of delivery, in order.

    A failed fetch is dropped when it is taken, so the next call tries again.
    """

    def __init__(self, fetcher: FetchHandle, *, ahead: int, bytes_max: int) -> None:
        self._fetcher = fetcher
        self._ahead = ahead
        self._bytes_max = bytes_max
        self._tasks: deque[tuple[int, asyncio.Task[ConsumedBatch]]] = deque()
        self._usual_bytes: int | None = (
            None  # moving average of the size of a batch; None before the first one
        )

    def plan(self, upcoming: Sequence[BatchDescriptor]) -> None:
        """Start to fetch `upcoming` in order, up to the limits. The first is needed immediately."""
        if self._tasks and (not upcoming or self._tasks[0][0] != upcoming[0].sequence or self._head_failed()):
            self.cancel()
        for descriptor in upcoming[len(self._tasks) : self._ahead + 1]:
            if self._tasks and not self._has_room():
                return
            task = asyncio.get_running_loop().create_task(self._fetcher.fetch(descriptor))
            self._tasks.append((descriptor.sequence, task))

    def _head_failed(self) -> bool:
        """Return whether the first fetch has failed. It is repeated, because its batch is needed now."""
        task = self._tasks[0][1]
        return task.done() and (task.cancelled() or task.exception() is not None)

    def _has_room(self) -> bool:
        """Return whether one more batch fits. A fetched batch counts with its own size, a running fetch with
        the usual size."""
        sizes = [
            len(task.result().block.data)
            for _, task in self._tasks
            if task.done() and not task.cancelled() and not task.exception()
        ]
        self._usual_bytes = max(sizes, default=self._usual_bytes)
        if self._usual_bytes is None:
            return False
        running = len(self._tasks) - len(sizes) + 1
        return sum(sizes) + running * self._usual_bytes <= self._bytes_max

    async def take(self) -> ConsumedBatch:
        """Return the first planned batch. If the caller is cancelled, the fetch continues for the next call.

        Raise `StorageError` if the fetch was cancelled during the wait.
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
            # The fetch was cancelled, not the caller. Re-raising would silently cancel the caller's task.
            raise StorageError(
                f"the consumer was closed or restarted while it fetched batch {sequence}"
            ) from None
        except BaseException:
            self._drop(task)
            raise
        self._usual_bytes = len(batch.block.data)
        return batch

    def taken(self) -> None:
        """Remove the first batch, which was delivered, unless `cancel` has removed everything."""
        if self._tasks:
            self._tasks.popleft()

    def _drop(self, task: asyncio.Task[ConsumedBatch]) -> None:
        if self._tasks and self._tasks[0][1] is task:
            self.cancel()

    def cancel(self) -> None:
        """Cancel and drop everything that was fetched ahead."""
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
