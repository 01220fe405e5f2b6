"""The producer: combines many small calls into few large objects and appends those with few manifest writes.

    produce ──▶ admission ──▶ open batch ──seal──▶ uploads (parallel) ──▶ committer ──▶ manifest
              bytes and calls   size, time, flush                          in order, one write

One task fills and seals batches, one commits them, and each upload is a task of its own. A failed batch fails
only its own callers.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TypeAlias

import pyarrow as pa

from penstock.buffer.append import ManifestAppender
from penstock.buffer.config import ProducerConfig
from penstock.buffer.errors import (
    BufferError,
    InvalidInputError,
    ManifestFull,
    OutcomeUnknown,
    ProducerClosed,
    StorageError,
    storage_error,
)
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest_file import ManifestFile
from penstock.buffer.upload import (
    BATCH_WEIGHT_MAX,
    FRAMING_BYTES,
    BatchUpload,
    DurabilityWatcher,
    OpenBatch,
    ProduceCall,
    WriteHandle,
    WriteOutcome,
)
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.codec import RecordChunk, as_binary_array, check_records
from penstock.errors import PenstockError, Rejected
from penstock.ids import SYSTEM_RNG
from penstock.limits import METADATA_BYTES_MAX
from penstock.metrics import Registry
from penstock.objects import ObjectStore, ensure_conditional_writes, open_store
from penstock.retry import RetryPolicy, retry

CHUNK_RECORDS_MIN = 128
"""The length from which a list is a chunk. Shorter lists are joined with their neighbours."""

LOOP_TURN_BYTES = 1024 * 1024
"""The bytes that are accepted before other tasks of the loop run. Otherwise a caller that never waits would
prevent storing until the producer is full."""

ENTRY_ROOM = 2048
"""The size of an entry in the manifest without its metadata, with the longest key of a store."""

Records: TypeAlias = Sequence[bytes] | pa.Array | pa.ChunkedArray
Held: TypeAlias = Sequence[bytes] | RecordChunk


class Admission:
    """The limit of the bytes that are not durable and of the calls that are not in a batch.

    Calls are admitted in order of arrival. A call larger than the whole limit is admitted alone.
    """

    def __init__(self, *, bytes_max: int, calls_max: int) -> None:
        self._bytes_max = bytes_max
        self._calls_max = calls_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.bytes_held = 0
        self.calls_waiting = 0

    async def enter(self, size: int) -> None:
        """Wait for space, then hold `size` bytes and one call slot."""
        if not self._waiting and self._fits(size):
            self._take(size)
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (size, ticket)
        self._waiting.append(waiter)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                # Admitted and cancelled at the same moment: free the space.
                self.leave_queue()
                self.release(size)
            else:
                # A caller that freed space at this moment may have removed the ticket already.
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                self._admit_waiting()
            raise

    def leave_queue(self, calls: int = 1) -> None:
        """Free the slots of `calls` that a batch has taken. Their bytes stay held."""
        self.calls_waiting -= calls
        self._admit_waiting()

    def release(self, size: int) -> None:
        """Free `size` bytes of records that are durable or have failed."""
        self.bytes_held -= size
        self._admit_waiting()

    def dismiss(self) -> None:
        """Admit all waiting calls. The producer has stopped and refuses them itself."""
        self._bytes_max = self._calls_max = sys.maxsize
        self._admit_waiting()

    def _fits(self, size: int) -> bool:
        if self.calls_waiting >= self._calls_max:
            return False
        return self.bytes_held == 0 or self.bytes_held + size <= self._bytes_max

    def _take(self, size: int) -> None:
        self.bytes_held += size
        self.calls_waiting += 1

    def _admit_waiting(self) -> None:
        while self._waiting:
            size, ticket = self._waiting[0]
            if ticket.cancelled():
                self._waiting.popleft()
                continue
            if not self._fits(size):
                return
            self._waiting.popleft()
            self._take(size)
            ticket.set_result(None)


class Producer:
    """Stores records durably and appends them to a queue, in the order of the calls.

    A queue may have many producers. Use `async with Producer(config) as producer`, or call `close()` at the
    end. The first `produce` starts the producer. An acknowledged record, one whose watcher succeeded, is in a
    stored object that the manifest names.
    """

    def __init__(
        self,
        config: ProducerConfig,
        clock: Clock = SYSTEM_CLOCK,
        store: ObjectStore | None = None,
        *,
        rng: random.Random = SYSTEM_RNG,
        registry: Registry | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng
        self._owns_store = store is None and not isinstance(config.store, ObjectStore)
        self._store = store or open_store(config.store, deadline_s=config.append_deadline_s)
        self._instruments = Instruments(registry)
        self._policy = RetryPolicy(deadline_s=config.append_deadline_s)
        self._prefix = config.prefix
        self._metadata_max = max(0, min(METADATA_BYTES_MAX, config.manifest_bytes_max - ENTRY_ROOM))
        self._compression = config.compression
        self._flush_interval_s = config.flush_interval_s
        self._flush_size = config.flush_size
        self._appender = ManifestAppender(
            ManifestFile(
                self._store,
                config.manifest_key,
                prefix=config.prefix,
                since_ms=clock.now_ms(),
                checks_dequeued=True,
            ),
            policy=self._policy,
            manifest_bytes_max=config.manifest_bytes_max,
            clock=clock,
            rng=rng,
            instruments=self._instruments,
        )
        self._admission = Admission(
            bytes_max=max(1, config.inflight_bytes_max // 2), calls_max=config.max_buffered_inputs
        )
        self._slots = asyncio.Semaphore(config.max_parallel_uploads)
        self._incoming: deque[tuple[ProduceCall, Held] | _FlushMark] = deque()
        self._untaken_bytes = 0
        self._open = OpenBatch(ordinal=0, merge=config.merge_metadata)
        self._expired = -1
        self._timer: asyncio.Task[None] | None = None
        self._ended_timers: set[asyncio.Task[None]] = set()
        """Timers that were cancelled because their batch was sealed."""
        self._pipeline: deque[BatchUpload] = deque()
        self._wake_batcher = asyncio.Event()
        self._wake_committer = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._started = False
        self._closing = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._defect: BufferError | None = None
        self._appending: list[BatchUpload] = []

    async def __aenter__(self) -> Producer:
        try:
            await self._check_store()
        except PenstockError as error:
            if self._owns_store:
                await self._store.close()
            raise storage_error(error, "opening the producer") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def produce(self, entries: Records, metadata: bytes = b"") -> WriteHandle:
        """Accept records and return a handle that reports when they are durable.

        Wait while the producer is full. Raise `InvalidInputError` if there are no records, if one is not
        bytes, or if they exceed the limits of the format. Raise `ProducerClosed` after `close`.
        """
        self._check_loop()
        if self._closing:
            raise ProducerClosed("the producer is closed")
        records, size = _checked(entries, metadata, self._metadata_max)
        call = ProduceCall(
            count=len(records),
            record_bytes=size,
            metadata=bytes(metadata),
            ingestion_time_ms=self._clock.now_ms(),
            accepted_at=self._clock.monotonic(),
            watcher=DurabilityWatcher(),
        )
        if self._untaken_bytes >= LOOP_TURN_BYTES:
            await asyncio.sleep(0)
        await self._admission.enter(call.weight)
        if self._closing:
            self._admission.leave_queue()
            self._admission.release(call.weight)
            raise ProducerClosed("the producer was closed while the call waited for space")
        self._start()
        self._incoming.append((call, records))
        self._untaken_bytes += call.weight
        self._wake_batcher.set()
        self._instruments.inflight_bytes.set(self._admission.bytes_held)
        return WriteHandle(watcher=call.watcher, ingestion_time_ms=call.ingestion_time_ms)

    async def flush(self) -> None:
        """Wait until everything produced before is settled. Raise the first error of this flush.

        Calls that failed earlier have reported that on their own handles.
        """
        if not self._closed:
            self._check_loop()
        if self._defect is not None:
            raise self._defect
        if not self._started or self._closed:
            return
        mark = _FlushMark()
        self._incoming.append(mark)
        self._wake_batcher.set()
        await mark.reached.wait()
        first_error = mark.error
        for watcher in mark.watchers:
            try:
                await watcher.await_durable()
            except BufferError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    async def close(self) -> None:
        """Flush, stop and refuse later calls. Raise the error of the flush after everything has stopped.

        If `close` is cancelled, calls whose manifest write is in progress end with `OutcomeUnknown`.
        """
        if self._closed:
            return
        self._closing = True
        try:
            await self.flush()
        finally:
            self._closed = True
            if self._loop in (None, asyncio.get_running_loop()):
                await self._stop()
            elif self._owns_store:
                await self._store.close()

    async def _check_store(self) -> None:
        await retry(
            lambda: ensure_conditional_writes(self._store, self._prefix),
            self._policy,
            clock=self._clock,
            rng=self._rng,
        )

    def conflict_rate(self) -> float:
        """The percentage of manifest writes that lost against another writer."""
        return 100.0 * self._appender.conflicts / self._appender.writes if self._appender.writes else 0.0

    def _check_loop(self) -> None:
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise ProducerClosed("the producer belongs to another event loop: make one in this loop")

    def _start(self) -> None:
        self._check_loop()
        if not self._started:
            self._started = True
            self._loop = asyncio.get_running_loop()
            self._spawn(self._fill_batches())
            self._spawn(self._commit_batches())

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.remove(task)
        if task in self._ended_timers:
            self._ended_timers.discard(task)
        elif task.cancelled():
            # `asyncio.run` cancels every task of the loop when its main task has failed.
            self._fail(StorageError("the producer's tasks were cancelled before the records were durable"))
        elif (defect := task.exception()) is not None:
            self._fail(StorageError(f"the producer stopped on an internal error: {defect!r}"))

    def _fail(self, error: StorageError) -> None:
        """Settle every call and refuse later ones, so that no caller waits for a task that has ended.

        The other tasks end too. Otherwise one could append records after their callers received an error.
        """
        if self._closed or self._defect is not None:
            return
        self._closing = True
        self._defect = error
        for other in self._tasks:
            other.cancel()
        self._give_up(error)

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._give_up(StorageError("the producer was shut down before the records were durable"))
            if self._owns_store:
                await self._store.close()

    def _give_up(self, error: BufferError) -> None:
        """Settle every waiting call, because no task is left to do it, and release all memory."""
        self._admission.dismiss()
        if self._appender.in_doubt:
            self._leave_in_doubt(self._appending)
        calls = [call for upload in self._pipeline for call in upload.batch.calls]
        calls += self._open.calls
        for item in self._incoming:
            if isinstance(item, _FlushMark):
                item.error = error
                item.reached.set()
            else:
                calls.append(item[0])
        self._abandon(calls, error)

    def _leave_in_doubt(self, uploads: list[BatchUpload]) -> None:
        error = OutcomeUnknown("the producer was shut down while the manifest was being written")
        self._abandon([call for upload in uploads for call in upload.batch.calls], error)

    def _abandon(self, calls: list[ProduceCall], error: BufferError) -> None:
        for call in calls:
            if call.watcher.result() is None:
                call.watcher.settle(WriteOutcome(error=error))
                self._admission.release(call.weight)
        self._instruments.inflight_bytes.set(self._admission.bytes_held)

    async def _fill_batches(self) -> None:
        while True:
            await self._wake_batcher.wait()
            self._wake_batcher.clear()
            self._untaken_bytes = 0
            while self._take_waiting() or self._is_due():
                await self._seal()
                while self._incoming and isinstance(mark := self._incoming[0], _FlushMark):
                    mark.watchers = [call.watcher for upload in self._pipeline for call in upload.batch.calls]
                    mark.reached.set()
                    # Removed last: if this task ends in between, the flush request must still be settled.
                    self._incoming.popleft()

    def _take_waiting(self) -> bool:
        """Take waiting calls, up to the flush size. Return whether the batch must be sealed now.

        It must be sealed if it is full or a flush is next in the queue. This function does not wait, and the
        deadline is checked after every call, so a queue that is never empty cannot delay it.
        """
        while self._incoming:
            item = self._incoming[0]
            if isinstance(item, _FlushMark) or self._is_full() or not self._open.fits(item[0]):
                return True
            if not self._open.calls:
                self._open.opened_at = self._clock.monotonic()
                self._timer = self._spawn(self._expire(self._open.ordinal))
            self._open.add(*item)
            self._incoming.popleft()
            self._admission.leave_queue()
        return self._is_full()

    def _is_full(self) -> bool:
        return self._open.size >= self._flush_size

    def _is_due(self) -> bool:
        return self._expired == self._open.ordinal or self._open.is_due(
            self._clock.monotonic(), self._flush_interval_s
        )

    async def _expire(self, ordinal: int) -> None:
        await self._clock.sleep(self._flush_interval_s)
        if self._open.ordinal == ordinal:
            self._expired = ordinal
            self._wake_batcher.set()

    async def _seal(self) -> None:
        """Pass the open batch to an upload. Wait for a free slot, which slows down the callers.

        Calls that arrive during the wait join the batch, up to the flush size. When uploads are slow, batches
        grow in size instead of number.
        """
        if not self._open.calls:
            return
        await self._slots.acquire()
        self._take_waiting()
        if self._timer is not None and self._timer.cancel():
            self._ended_timers.add(self._timer)
        batch = self._open
        self._open = OpenBatch(ordinal=batch.ordinal + 1, merge=self._config.merge_metadata)
        upload = BatchUpload(
            batch,
            store=self._store,
            prefix=self._prefix,
            compression=self._compression,
            policy=self._policy,
            clock=self._clock,
            rng=self._rng,
        )
        self._pipeline.append(upload)
        self._spawn(self._run_upload(upload))

    async def _run_upload(self, upload: BatchUpload) -> None:
        try:
            await upload.run(self._appender.floor_ms)
        finally:
            self._slots.release()
            self._wake_committer.set()

    async def _commit_batches(self) -> None:
        """Append ready batches in order. A batch waits for every earlier one."""
        while True:
            await self._wake_committer.wait()
            self._wake_committer.clear()
            while ready := self._ready():
                await self._commit([upload for upload in ready if upload.error is None])
                for upload in ready:
                    if upload.error is not None:
                        self._settle(upload, WriteOutcome(error=upload.error))
                    self._pipeline.popleft()

    def _ready(self) -> list[BatchUpload]:
        ready: list[BatchUpload] = []
        for upload in self._pipeline:
            if not upload.finished:
                break
            ready.append(upload)
        return ready

    async def _commit(self, uploads: list[BatchUpload]) -> None:
        if not uploads:
            return
        try:
            await self._check_store()
            self._appending = uploads
            landed = await self._appender.append(uploads)
        except ManifestFull as error:
            self._appending = []
            await self._commit_less(uploads, error)
            return
        except PenstockError as error:
            self._appending = []
            wrapped = storage_error(error, f"appending to {self._config.manifest_path}")
            for upload in uploads:
                upload.error = wrapped
            return
        for number, upload in enumerate(uploads):
            self._count(upload)
            self._settle(
                upload, WriteOutcome(sequence=landed.first + number, location=landed.locations[number])
            )

    async def _commit_less(self, uploads: list[BatchUpload], error: ManifestFull) -> None:
        """Append the batches of a group that fit into the manifest. Fail only the others."""
        if len(uploads) == 1:
            uploads[0].error = error
            return
        half = len(uploads) // 2
        await self._commit(uploads[:half])
        await self._commit(uploads[half:])

    def _settle(self, upload: BatchUpload, outcome: WriteOutcome) -> None:
        for call, start in zip(upload.batch.calls, upload.batch.starts, strict=True):
            call.watcher.settle(outcome if outcome.error else replace(outcome, start_index=start))
            self._admission.release(call.weight)
        self._instruments.inflight_bytes.set(self._admission.bytes_held)
        oldest = next((u.batch.calls[0].accepted_at for u in self._pipeline if u is not upload), None)
        age_s = 0.0 if oldest is None else self._clock.monotonic() - oldest
        self._instruments.oldest_unflushed.set(age_s)

    def _count(self, upload: BatchUpload) -> None:
        instruments, batch = self._instruments, upload.batch
        instruments.batches_flushed.inc()
        instruments.entries_flushed.inc(batch.count)
        instruments.bytes_flushed.inc(batch.record_bytes)
        instruments.bytes_written.inc(upload.object_bytes)
        instruments.flush_duration.observe(self._clock.monotonic() - upload.sealed_at)


class _FlushMark:
    """A flush request in the queue of calls. It covers every call before it."""

    __slots__ = ("error", "reached", "watchers")

    def __init__(self) -> None:
        self.error: BufferError | None = None
        self.reached = asyncio.Event()
        self.watchers: list[DurabilityWatcher] = []


def _checked(entries: Records, metadata: bytes, metadata_max: int) -> tuple[Held, int]:
    """Return the records as immutable values, and their size."""
    if not isinstance(metadata, (bytes, bytearray, memoryview)):
        raise InvalidInputError(f"metadata must be bytes, not {type(metadata).__name__}")
    if len(metadata) > metadata_max:
        raise InvalidInputError(
            f"metadata of {len(metadata)} bytes is more than the {metadata_max} that a manifest can take"
        )
    try:
        records, size = _frozen(entries)
    except Rejected as error:
        raise InvalidInputError(str(error)) from error
    if len(records) == 0:
        raise InvalidInputError("a call needs at least one record (an empty record is fine: [b''])")
    if size + FRAMING_BYTES * len(records) > BATCH_WEIGHT_MAX:
        raise InvalidInputError(
            f"one call of {size} bytes in {len(records)} records is beyond the {BATCH_WEIGHT_MAX} bytes "
            "of a batch; split it into several calls"
        )
    return records, size


def _frozen(entries: Records) -> tuple[Held, int]:
    if not isinstance(entries, list | tuple):
        chunk = RecordChunk.of_array(as_binary_array(entries))
        return chunk, chunk.record_bytes
    size = check_records(entries)
    if len(entries) < CHUNK_RECORDS_MIN:
        return tuple(entries), size
    if size > BATCH_WEIGHT_MAX:
        return entries, size  # the caller refuses it; do not encode it
    return RecordChunk.of_list(entries), size
