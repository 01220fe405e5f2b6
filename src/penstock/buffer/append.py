"""Appending stored batches to a queue: all in one manifest write, and under a transaction only once."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from penstock import errors
from penstock.buffer import book
from penstock.buffer.batch import batch_minted_ms, is_own
from penstock.buffer.config import ProducerConfig, QueueConfig
from penstock.buffer.errors import InvalidInputError, StaleTransaction, StorageUnavailable, storage_error
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest import NewEntry
from penstock.buffer.manifest_file import ManifestFile, Snapshot
from penstock.buffer.queue_producer import QueueProducer
from penstock.buffer.stored_batch import StoredBatch
from penstock.buffer.transaction import NO_VERSION, Transaction, encode_tag, newest_version
from penstock.buffer.upload import STALE_AFTER_S
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import SYSTEM_RNG, mint_ulid
from penstock.metrics import Registry
from penstock.objects import ObjectStore, ensure_conditional_writes, open_store
from penstock.retry import RetryPolicy, retry

__all__ = ["Appended", "append_batches", "last_version"]

_log = logging.getLogger(__name__)

BOOK_DEADLINE_S = 5.0
"""How long a finished append keeps its caller for the sake of the book, which only foreign consumers need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """What an append came to. `first` is the sequence of its first batch; None if nothing was appended."""

    first: int | None
    count: int
    repeated: bool
    """Whether the transaction had been committed before, so that there was nothing to do."""


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
    """Put batches that are stored in the queue's own folder into it, in order, all or none, in one write.

    Under a transaction this may be repeated, after any error and by another process: what is committed is
    not appended again. Of `batches` only the first run's count, as those of a repetition are not looked at.
    `follows` demands that the application's last version is this one (`NO_VERSION`: that it has none).
    Raises `StaleTransaction` if the application has committed a later version or does not stand where
    `follows` says, `OutcomeUnknown` if the batches may be in the queue (repeat it under the same transaction
    to find out), and `StorageError` if not.
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
        guard = _Guard(file, transaction, follows)
        try:
            await retry(
                lambda: ensure_conditional_writes(opened, config.prefix), policy, clock=clock, rng=rng
            )
        except errors.PenstockError as error:
            raise storage_error(error, f"appending to {file.path}") from error
        instruments = Instruments(registry)
        queue = QueueProducer(
            file,
            policy=policy,
            manifest_bytes_max=config.manifest_bytes_max,
            clock=clock,
            rng=rng,
            instruments=instruments,
        )
        tail = b"" if transaction is None else encode_tag(transaction)
        placed = [_Placed(batch, tail, opened, config.prefix, policy, clock, rng) for batch in batches]
        landed = await queue.append_unless(placed, guard.is_committed)
        await guard.enter(RetryPolicy(deadline_s=BOOK_DEADLINE_S), clock, rng)
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
    """The last version that `app` has committed to the queue, or None. Raises `StorageError`."""
    async with _opened(config, store, retry_deadline_s) as opened:
        file = ManifestFile(opened, config.manifest_key, checks_ledger=True)
        policy = RetryPolicy(deadline_s=retry_deadline_s)

        async def look() -> int | None:
            return await _last_version(file, await file.read(), app)

        try:
            return await retry(look, policy, clock=clock, rng=rng)
        except errors.PenstockError as error:
            raise storage_error(error, f"reading {file.path}") from error


async def _last_version(file: ManifestFile, snapshot: Snapshot, app: str) -> int | None:
    """Steps 1 to 3 of `penstock.buffer.transaction`: the manifest was read, and now the book is."""
    queued = newest_version(snapshot.raw, app)
    known, _ = await book.fetch_book(file)
    return max((version for version in (queued, known.get(app)) if version is not None), default=None)


@asynccontextmanager
async def _opened(
    config: QueueConfig, store: ObjectStore | None, deadline_s: float
) -> AsyncIterator[ObjectStore]:
    """The store to use; closed in the end if it was opened here."""
    opened = store or open_store(config.store, deadline_s=deadline_s)
    try:
        yield opened
    finally:
        if store is None and opened is not config.store:
            await opened.close()


class _Guard:
    """What keeps a transaction from being committed twice. Without one it lets everything pass."""

    def __init__(self, file: ManifestFile, transaction: Transaction | None, follows: int | None) -> None:
        self._file = file
        self._transaction = transaction
        self._follows = follows

    async def is_committed(self, snapshot: Snapshot) -> bool:
        if self._transaction is None:
            return False
        app, version = self._transaction.app, self._transaction.version
        last = await _last_version(self._file, snapshot, app)
        if last is not None and last > version:
            raise StaleTransaction(
                f"{app!r} has committed version {last} to {self._file.path} and now asks for {version}: its "
                "checkpoint was set back, copied, or is in use twice. Go on with the checkpoint that wrote "
                f"version {last}, or start anew with an empty one"
            )
        if last != version and self._follows is not None:
            self._check_order(NO_VERSION if last is None else last)
        return last == version

    def _check_order(self, last: int) -> None:
        if last != self._follows:
            assert self._transaction is not None
            app = self._transaction.app
            raise StaleTransaction(
                f"{app!r} stands at version {_told(last)} in {self._file.path}, and this step goes on from "
                f"{_told(self._follows)}: another process works under the same name. Stop one of the two, "
                "or look up the version and go on from there"
            )

    async def enter(self, policy: RetryPolicy, clock: Clock, rng: random.Random) -> None:
        """Step 5. The append is done and true without it, so failing is worth a warning only."""
        if self._transaction is None:
            return
        versions = {self._transaction.app: self._transaction.version}
        passing = (errors.Unavailable, errors.Conflict, errors.OutcomeUnknown)
        try:
            await retry(lambda: book.enter(self._file, versions), policy, clock=clock, rng=rng, on=passing)
        except errors.PenstockError as error:
            _log.warning(
                "%s was not written (%s); a Penstock consumer will do it, others may dequeue too early",
                self._file.book_path,
                error,
            )


def _told(version: int | None) -> str:
    return "none" if version == NO_VERSION else str(version)


class _Placed:
    """A stored batch on its way into the queue (`penstock.buffer.queue_producer.Upload`)."""

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

    async def relocate(self, floor_ms: int) -> None:
        """Copy the object. Whoever stored it has the records no longer, or is on another machine."""
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
        # Only now: a name that was not stored must never look like one that can be referenced.
        self._batch = replace(batch, location=location, minted_ms=minted_ms)
