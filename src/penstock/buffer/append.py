"""Appending to the manifest: one conditional write for all finished batches, and no batch twice.

The reply to a conditional write may leave its outcome open. Two requests can then carry the same batch: one
that timed out and is still in transit, and the one sent after it. The appender therefore keeps every attempt
until a fresh manifest shows that it can no longer land, and looks for its location before it appends again.

`append_batches` appends batches that are already stored. Under a transaction it appends them only once.
"""

from __future__ import annotations

import enum
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar, overload

from penstock import errors
from penstock.buffer import manifest
from penstock.buffer.batch import batch_minted_ms, is_own
from penstock.buffer.config import ProducerConfig, QueueConfig
from penstock.buffer.errors import (
    BufferError,
    InvalidInputError,
    ManifestFull,
    OutcomeUnknown,
    RetriesExhausted,
    SerializationError,
    StorageUnavailable,
    storage_error,
)
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest import NewEntry
from penstock.buffer.manifest_file import ManifestFile, Snapshot
from penstock.buffer.side_objects import NO_FLOOR, Floor, read_dequeued_log, read_floor
from penstock.buffer.transactions import Transaction, TransactionGuard, TransactionLog, encode_tag
from penstock.buffer.upload import STALE_AFTER_S, StoredBatch
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.metrics import Registry
from penstock.objects import ObjectStore, Version, ensure_conditional_writes, open_store
from penstock.retry import Backoff, RetryPolicy, retry
from penstock.units import format_size

_log = logging.getLogger(__name__)

TRANSACTION_LOG_DEADLINE_S = 5.0
"""How long an append waits to write the transaction log. Only consumers of other implementations need it."""

T = TypeVar("T")
IsDone: TypeAlias = Callable[[Snapshot], Awaitable[bool]]

CONTENDED_READS = 3
"""The reads after a conflict that must find the manifest unchanged before the cached one is used again."""


class AppendOutcome(enum.Enum):
    """The result of looking for an earlier attempt in a fresh manifest."""

    LANDED = "landed"
    LOST = "lost"
    """Not in the queue, and its base was replaced, so it can never land."""
    OPEN = "open"
    """Not in the queue, but a slow request may still match. The next append has the same base, so at most one
    of the two can win."""
    DEQUEUED = "dequeued"
    """Its number was assigned and has left the manifest. Only the dequeued log shows which batch had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One conditional write of one or more batches, which land together or not at all."""

    base: Version | None
    first: int
    locations: tuple[str, ...]
    refused: bool = False
    """Whether the store confirmed that this write was not applied."""

    @property
    def last(self) -> int:
        return self.first + len(self.locations) - 1


def resolve_attempt(attempt: Attempt, raw: bytes, version: Version | None) -> AppendOutcome:
    """Return the outcome of an attempt, judged by its last batch, which is dequeued last."""
    if manifest.locate(raw, attempt.locations[-1]) is not None:
        return AppendOutcome.LANDED
    footer = manifest.read_footer(raw)
    if footer.next_sequence <= attempt.last:
        return AppendOutcome.OPEN if version == attempt.base else AppendOutcome.LOST
    if manifest.first_sequence(raw) <= attempt.last:
        return AppendOutcome.LOST
    return AppendOutcome.DEQUEUED


def resolve_by_dequeued_log(attempt: Attempt, dequeued: Mapping[int, str]) -> AppendOutcome:
    """Settle `AppendOutcome.DEQUEUED` with the consumer's dequeued log.

    Return DEQUEUED again if the dequeued log does not reach back far enough.
    """
    location = dequeued.get(attempt.last)
    if location is None:
        return AppendOutcome.DEQUEUED
    return AppendOutcome.LANDED if location == attempt.locations[-1] else AppendOutcome.LOST


class Upload(Protocol):
    """A stored batch that is being appended to the queue."""

    def entry(self) -> NewEntry:
        """Return the current location and the metadata to append."""
        ...

    def is_stale(self, floor_ms: int) -> bool:
        """Return whether the object may be collected before it is referenced, and must be stored again."""
        ...

    async def reupload(self, floor_ms: int) -> None:
        """Store the same bytes again under a name minted after `floor_ms`."""
        ...


class ManifestAppender:
    """Appends batches to the manifest.

    It caches the last manifest that it wrote, so an append without contention needs no read.
    """

    def __init__(
        self,
        file: ManifestFile,
        *,
        policy: RetryPolicy,
        manifest_bytes_max: int,
        clock: Clock,
        rng: random.Random,
        instruments: Instruments,
    ) -> None:
        self._file = file
        self._policy = policy
        self._manifest_bytes_max = manifest_bytes_max
        self._clock = clock
        self._rng = rng
        self._instruments = instruments
        self._manifest_writes = instruments.manifest_writes.labels(role="producer")
        self._manifest_conflicts = instruments.manifest_conflicts.labels(role="producer")
        self._cached: Snapshot | None = None
        self._floor: tuple[int, Floor] | None = None
        self._open_attempts: list[Attempt] = []
        self._contended = 0
        self.writes = 0
        self.conflicts = 0

    @property
    def floor_ms(self) -> int:
        """The highest known floor; the names of batches must be minted above it."""
        return self._floor[1].floor_ms if self._floor else NO_FLOOR.floor_ms

    @property
    def in_doubt(self) -> bool:
        """Whether the current append, if it is abandoned, may be in the queue."""
        return bool(_doubtful(self._open_attempts))

    @overload
    async def append(self, uploads: Sequence[Upload]) -> Attempt: ...
    @overload
    async def append(self, uploads: Sequence[Upload], is_done: IsDone) -> Attempt | None: ...
    async def append(self, uploads: Sequence[Upload], is_done: IsDone | None = None) -> Attempt | None:
        """Append all batches in order, in one write, and return the attempt that landed.

        Return None if `is_done` finds that the manifest about to be replaced needs no append. `is_done` is
        called for every attempt, because its result is valid for one manifest only. Raise `OutcomeUnknown` if
        it cannot be determined whether the batches are in the queue. After any other error they are not in
        the queue and never will be.
        """
        open_attempts = self._open_attempts = []
        try:
            return await self._append(uploads, open_attempts, is_done)
        except BufferError as error:
            if isinstance(error, OutcomeUnknown) or not _doubtful(open_attempts):
                raise
            raise self._unknown(_doubtful(open_attempts), error) from error
        except errors.PenstockError as error:
            if doubtful := _doubtful(open_attempts):
                raise self._unknown(doubtful, error) from error
            raise storage_error(error, f"appending to {self._file.path}") from error

    async def _append(
        self, uploads: Sequence[Upload], open_attempts: list[Attempt], is_done: IsDone | None
    ) -> Attempt | None:
        backoff = Backoff(self._policy, clock=self._clock, rng=self._rng)
        while True:
            try:
                snapshot = await self._base()
                landed = await self._settle(open_attempts, snapshot)
                if landed is not None:
                    self._cached = snapshot
                    return landed
                if is_done is not None and await is_done(snapshot):
                    self._cached = snapshot
                    return None
                await self._freshen(uploads, snapshot)
                return await self._attempt(uploads, snapshot, open_attempts)
            except ManifestFull:
                if self._cached is None:
                    raise
                self._cached = None  # it was full, but the consumer may have dequeued since
            except (errors.Conflict, errors.OutcomeUnknown, errors.Unavailable) as error:
                if isinstance(error, BufferError):
                    raise
                self._cached = None
                if not await backoff.pause():
                    return await self._last_look(open_attempts, error)

    async def _base(self) -> Snapshot:
        """Return the manifest to append to: the cached one while there is no contention, else a fresh one."""
        if self._cached is None:
            return await self._file.read()
        if not self._contended:
            return self._cached
        fresh = await self._file.reread(self._cached)
        self._contended = self._contended - 1 if fresh is self._cached else CONTENDED_READS
        return fresh

    async def _attempt(
        self, uploads: Sequence[Upload], base: Snapshot, open_attempts: list[Attempt]
    ) -> Attempt:
        entries = [upload.entry() for upload in uploads]
        raw = manifest.append(base.raw, entries)
        if len(raw) > self._manifest_bytes_max:
            raise ManifestFull(
                f"{self._file.path} would grow to {format_size(len(raw))}, above the cap of "
                f"{format_size(self._manifest_bytes_max)}: its consumer is not running or lags too far"
            )
        attempt = Attempt(
            base=base.version,
            first=base.footer.next_sequence,
            locations=tuple(entry.location for entry in entries),
        )
        open_attempts.append(attempt)
        self.writes += 1
        self._manifest_writes.inc()
        try:
            written = await self._file.write(raw, base)
        except errors.Conflict as conflict:
            self.conflicts += 1
            self._contended = CONTENDED_READS
            if conflict.definite:
                open_attempts[-1] = replace(attempt, refused=True)
            self._manifest_conflicts.inc()
            raise
        except (errors.Rejected, errors.Unavailable):
            open_attempts.remove(attempt)  # definite by the store's contract: it cannot be in the queue
            raise
        open_attempts.clear()
        self._cached = written
        self._instruments.manifest_bytes.set(len(raw))
        self._instruments.queue_length.set(base.footer.entry_count + len(entries))
        self._instruments.append_group_size.observe(len(entries))
        return attempt

    async def _settle(self, open_attempts: list[Attempt], snapshot: Snapshot) -> Attempt | None:
        """Look up every earlier attempt and return the one that landed, if any.

        Drop attempts that can no longer land. An attempt that the store definitely refused is looked up too,
        because a proxy may have sent it twice, but it is never in doubt. Raise `OutcomeUnknown` if the
        outcome of an attempt cannot be determined.
        """
        undecided: list[Attempt] = []
        for attempt in tuple(open_attempts):
            outcome = resolve_attempt(attempt, snapshot.raw, snapshot.version)
            if outcome is AppendOutcome.DEQUEUED:
                dequeued: dict[int, str] = await self._read_side(
                    self._file.dequeued_path, read_dequeued_log, {}
                )
                outcome = resolve_by_dequeued_log(attempt, dequeued)
                if outcome is not AppendOutcome.DEQUEUED:
                    self._instruments.append_unknown.inc(resolved="true")
            if attempt.refused and outcome is not AppendOutcome.LANDED:
                outcome = AppendOutcome.LOST
            if outcome is AppendOutcome.LANDED:
                open_attempts.clear()
                return attempt
            if outcome is AppendOutcome.DEQUEUED:
                undecided.append(attempt)
            if outcome is AppendOutcome.LOST:
                open_attempts.remove(attempt)
        if undecided:
            raise self._unknown(undecided, None)
        return None

    async def _freshen(self, uploads: Sequence[Upload], snapshot: Snapshot) -> None:
        """Do steps b and c of the garbage floor, after the read of the manifest and before its write."""
        epoch = snapshot.footer.epoch
        if self._floor is None or self._floor[0] != epoch:
            self._floor = (epoch, await self._read_side(self._file.floor_path, read_floor, NO_FLOOR))
        for upload in uploads:
            if upload.is_stale(self.floor_ms):
                self._instruments.reuploads.inc()
                await upload.reupload(self.floor_ms)

    async def _read_side(self, path: str, decode: Callable[[bytes], T], absent: T) -> T:
        """Read a side object. Read it again if it does not decode: the response may have been truncated."""
        raw, _ = await self._file.read_side(path)
        try:
            return absent if raw is None else decode(raw)
        except SerializationError:
            raw, _ = await self._file.read_side(path)
            return absent if raw is None else decode(raw)

    async def _last_look(self, open_attempts: list[Attempt], last_error: errors.PenstockError) -> Attempt:
        """Read the manifest once more after the deadline: return the attempt that landed, or raise."""
        if open_attempts:
            snapshot = await self._file.read()
            landed = await self._settle(open_attempts, snapshot)
            if landed is not None:
                return landed
        if doubtful := _doubtful(open_attempts):
            raise self._unknown(doubtful, last_error) from last_error
        raise RetriesExhausted(
            f"appending to {self._file.path} did not succeed within {self._policy.deadline_s:g} s "
            f"({self.conflicts} of {self.writes} manifest writes conflicted): {last_error}"
        ) from last_error

    def _unknown(self, attempts: Sequence[Attempt], cause: errors.PenstockError | None) -> OutcomeUnknown:
        self._instruments.append_unknown.inc(resolved="false")
        names = ", ".join(attempt.locations[-1] for attempt in attempts)
        because = f" ({cause})" if cause else ": its number was dequeued before it could be looked up"
        return OutcomeUnknown(f"the append of {names} to {self._file.path} may have landed{because}")


def _doubtful(attempts: Sequence[Attempt]) -> list[Attempt]:
    return [attempt for attempt in attempts if not attempt.refused]


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """The result of an append. `first` is the sequence of its first batch; None if nothing was appended."""

    first: int | None
    count: int
    repeated: bool
    """Whether the transaction was already committed. Nothing was appended then."""


async def append_batches(
    config: ProducerConfig,
    batches: Sequence[StoredBatch],
    transaction: Transaction | None = None,
    *,
    follows: int | None = None,
    store: ObjectStore | None = None,
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random = SYSTEM_RNG,
    registry: Registry | None = None,
) -> Appended:
    """Append batches that are stored in the queue's own folder, in order, all or none, in one write.

    Under a transaction the call may be repeated after any error, also by another process. A committed
    transaction is not appended again, and the `batches` of the repetition are ignored.

    `follows` is the version that the application must have committed last (`NO_VERSION`: none).

    Raise `StaleTransaction` if the application has committed a later version, or if its last version is not
    `follows`. Raise `OutcomeUnknown` if the batches may be in the queue: repeat the call under the same
    transaction to find out. Raise `StorageError` if they are not in the queue.
    """
    if not batches:
        return Appended(first=None, count=0, repeated=False)
    outside = [batch.location for batch in batches if not is_own(batch.location, config.prefix)]
    if outside:
        raise InvalidInputError(f"{outside[0]} is not in {config.prefix}/ itself: store it for this queue")
    policy = RetryPolicy(deadline_s=config.append_deadline_s)
    async with _opened(config, store, config.append_deadline_s) as opened:
        own_ms = [ms for ms in (batch_minted_ms(batch.location) for batch in batches) if ms is not None]
        file = ManifestFile(
            opened, config.manifest_key, prefix=config.prefix, since_ms=min(own_ms, default=clock.now_ms())
        )
        guard = TransactionGuard(file, transaction, follows)
        try:
            await retry(
                lambda: ensure_conditional_writes(opened, config.prefix), policy, clock=clock, rng=rng
            )
        except errors.PenstockError as error:
            raise storage_error(error, f"appending to {file.path}") from error
        instruments = Instruments(registry)
        queue = ManifestAppender(
            file,
            policy=policy,
            manifest_bytes_max=config.manifest_bytes_max,
            clock=clock,
            rng=rng,
            instruments=instruments,
        )
        tail = b"" if transaction is None else encode_tag(transaction)
        placed = [StoredAppend(batch, tail, opened, config.prefix, policy, clock, rng) for batch in batches]
        landed = await queue.append(placed, guard.is_committed)
        await guard.enter(RetryPolicy(deadline_s=TRANSACTION_LOG_DEADLINE_S), clock, rng)
    if landed is None:
        return Appended(first=None, count=0, repeated=True)
    instruments.batches_flushed.inc(len(batches))
    instruments.entries_flushed.inc(sum(batch.record_count for batch in batches))
    instruments.bytes_flushed.inc(sum(batch.record_bytes for batch in batches))
    instruments.bytes_written.inc(sum(batch.size for batch in batches))
    return Appended(first=landed.first, count=len(batches), repeated=False)


async def last_version(
    config: QueueConfig,
    app: str,
    *,
    store: ObjectStore | None = None,
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random = SYSTEM_RNG,
    retry_deadline_s: float = 30.0,
) -> int | None:
    """Return the last version that `app` has committed to the queue, or None. Raises `StorageError`."""
    async with _opened(config, store, retry_deadline_s) as opened:
        file = ManifestFile(opened, config.manifest_key, checks_dequeued=True)
        policy = RetryPolicy(deadline_s=retry_deadline_s)

        async def look() -> int | None:
            return await TransactionLog(file).last_version(await file.read(), app)

        try:
            return await retry(look, policy, clock=clock, rng=rng)
        except errors.PenstockError as error:
            raise storage_error(error, f"reading {file.path}") from error


@asynccontextmanager
async def _opened(
    config: QueueConfig, store: ObjectStore | None, deadline_s: float
) -> AsyncIterator[ObjectStore]:
    """Open the store if needed. A store opened here is closed at the end."""
    opened = store or open_store(config.store, deadline_s=deadline_s)
    try:
        yield opened
    finally:
        if store is None and opened is not config.store:
            await opened.close()


class StoredAppend:
    """An upload whose records are no longer in memory: `reupload` copies the stored object."""

    def __init__(
        self,
        batch: StoredBatch,
        tail: bytes,
        store: ObjectStore,
        prefix: str,
        policy: RetryPolicy,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._batch = batch
        self._tail = tail
        self._store = store
        self._prefix = prefix
        self._policy = policy
        self._clock = clock
        self._rng = rng

    def entry(self) -> NewEntry:
        return NewEntry(location=self._batch.location, metadata=self._batch.metadata, tail=self._tail)

    def is_stale(self, floor_ms: int) -> bool:
        minted_ms = self._batch.minted_ms
        return minted_ms <= floor_ms or self._clock.now_ms() - minted_ms > STALE_AFTER_S * 1000

    async def reupload(self, floor_ms: int) -> None:
        """Copy the object to a new name. The process that stored it has ended or is on another machine."""
        batch = self._batch
        minted_ms = max(self._clock.now_ms(), floor_ms + 1)
        location = f"{self._prefix}/{mint_ulid(minted_ms, self._rng)}.batch"

        async def copy() -> None:
            await self._store.put(location, (await self._store.get(batch.location)).data)

        try:
            await retry(copy, self._policy, clock=self._clock, rng=self._rng)
        except errors.NotFound as error:
            raise StorageUnavailable(
                f"{batch.location} waited too long to be appended to the queue and was collected as garbage: "
                "store its records again"
            ) from error
        # Set last: the name of an object that was not stored must never be referenced.
        self._batch = replace(batch, location=location, minted_ms=minted_ms)
