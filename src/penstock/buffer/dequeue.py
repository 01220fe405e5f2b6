"""The consumer's side of the manifest: its epoch, a view of the entries, and dequeues under that epoch."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock import errors
from penstock.buffer import manifest
from penstock.buffer.errors import (
    FencedError,
    InvalidInputError,
    RetriesExhausted,
    SerializationError,
    storage_error,
)
from penstock.buffer.instruments import Instruments
from penstock.buffer.manifest import U64_MAX, EntryIndex
from penstock.buffer.manifest_file import ManifestFile, Snapshot
from penstock.buffer.side_objects import EPOCH_STRIDE, DequeuedLog
from penstock.buffer.transactions import TransactionLog, tags
from penstock.clock import Clock
from penstock.objects import Version
from penstock.retry import Backoff, RetryPolicy, retry

T = TypeVar("T")

_log = logging.getLogger(__name__)

UNINITIALISED = U64_MAX
"""The epoch of a consumer that is not initialised. It never appears in a manifest."""


def next_epoch(epoch: int, step: int = 1) -> int:
    """Return the epoch `step` later, skipping `UNINITIALISED`."""
    following = epoch + step
    return following if following < UNINITIALISED else following - UNINITIALISED


class Dequeuer:
    """The owner of a queue. Only the owner whose epoch is in the manifest may change the queue."""

    def __init__(
        self,
        file: ManifestFile,
        *,
        policy: RetryPolicy,
        clock: Clock,
        rng: random.Random,
        instruments: Instruments,
    ) -> None:
        self.file = file
        self.epoch = UNINITIALISED
        self._sealing: int | None = None  # the epoch that may be in the manifest after an unknown outcome
        self._fenced_by: int | None = None
        self._closed = False
        self.created = False
        """Whether the manifest was absent when this consumer took over."""
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._instruments = instruments
        self._manifest_writes = instruments.manifest_writes.labels(role="consumer")
        self._manifest_conflicts = instruments.manifest_conflicts.labels(role="consumer")
        self._snapshot: Snapshot | None = None
        self._index: EntryIndex | None = None
        self._dequeued: tuple[DequeuedLog, Version | None] | None = None
        self._editing = asyncio.Lock()

    @property
    def initialised(self) -> bool:
        return self.epoch != UNINITIALISED

    @property
    def length(self) -> int:
        """The number of entries when the manifest was last read or written."""
        return 0 if self._index is None else len(self._index)

    async def initialize(self) -> EntryIndex:
        """Take over the queue: create the manifest, or increment the epoch, which fences the last owner."""
        mine = UNINITIALISED

        def bump(snapshot: Snapshot) -> bytes:
            nonlocal mine
            self.created = snapshot.version is None
            mine = next_epoch(snapshot.footer.epoch)
            return manifest.set_epoch(snapshot.raw, mine)

        async with self._editing:
            # Repeating after an unknown outcome is safe: the epoch only grows, and the newest consumer wins.
            await self._edit(bump)
            self.epoch, self._sealing, self._fenced_by, self._closed = mine, None, None, False
            self._dequeued = None  # another owner may have written it
        return self._current()

    def close(self) -> None:
        """Release the queue: every later call raises `FencedError`."""
        self._closed = True

    async def entries(self) -> EntryIndex:
        """Read the queue in one request; "not modified" transfers no bytes. Raise `FencedError`."""
        while True:
            self.require_epoch()
            known = self._snapshot
            snapshot = await self._retrying(functools.partial(self._read, known), "reading")
            # Another task of this consumer may have written the manifest during the read. The result is then
            # outdated, and its epoch proves nothing: read again.
            if self._snapshot is known:
                self._check_epoch(snapshot)
                self._adopt(snapshot)
                return self._current()

    async def _read(self, known: Snapshot | None) -> Snapshot:
        return await (self.file.read() if known is None else self.file.reread(known))

    async def dequeue(self, through: int) -> int:
        """Remove the entries up to and including `through`, and return their number.

        The side objects are written first. A producer whose number is gone finds it in the dequeued log. The
        transaction log keeps a transaction known after its entries are gone. Raise `FencedError`, and
        `InvalidInputError` if `through` is not assigned yet.
        """
        self.require_epoch()
        removed = 0

        def cut(snapshot: Snapshot) -> bytes | None:
            nonlocal removed
            self._check_epoch(snapshot)
            if through >= snapshot.footer.next_sequence:
                raise InvalidInputError(
                    f"sequence {through} does not exist yet; the next is {snapshot.footer.next_sequence}"
                )
            raw = manifest.dequeue(snapshot.raw, through)
            removed = snapshot.footer.entry_count - manifest.read_footer(raw).entry_count
            return raw if removed else None

        async with self._editing:
            known = self._snapshot
            await self._edit(
                cut,
                before=lambda snapshot: self._write_sides(snapshot, through),
                fresh=known is not None and through >= known.footer.next_sequence,
            )
        return removed

    async def seal(self) -> EntryIndex:
        """Do step 2 of the garbage floor (`side_objects`): change the epoch of the manifest.

        Return the entries of exactly the manifest that was written.
        """
        self.require_epoch()
        target = next_epoch(self.epoch, EPOCH_STRIDE)

        def move(snapshot: Snapshot) -> bytes | None:
            if snapshot.footer.epoch == target:
                return None  # an earlier attempt landed
            self._check_epoch(snapshot)
            return manifest.set_epoch(snapshot.raw, target)

        async with self._editing:
            self._sealing = target
            await self._edit(move)
            self.epoch, self._sealing = target, None
        return self._current()

    async def known_dequeued(self) -> dict[int, str]:
        """Return the dequeued log as sequence to location. A damaged log counts as empty."""
        log, _ = await self._read_dequeued_log()
        return dict(log.known)

    async def _read_dequeued_log(self) -> tuple[DequeuedLog, Version | None]:
        if self._dequeued is None:
            raw, version = await self._retrying(
                lambda: self.file.read_side(self.file.dequeued_path), "reading the ledger of"
            )
            try:
                self._dequeued = (DequeuedLog() if raw is None else DequeuedLog.read(raw)), version
            except SerializationError as error:
                _log.warning("%s starts empty with the next dequeue: %s", self.file.dequeued_path, error)
                self._dequeued = DequeuedLog(), version
        return self._dequeued

    async def _write_sides(self, snapshot: Snapshot, through: int) -> None:
        committed = tags(snapshot.raw, through)
        if committed:
            await TransactionLog(self.file).enter(committed)
        await self._write_dequeued_log(snapshot, through)

    async def _write_dequeued_log(self, snapshot: Snapshot, through: int) -> None:
        log, version = await self._read_dequeued_log()
        index = self._current() if snapshot is self._snapshot else manifest.index(snapshot.raw)
        leaving = itertools.takewhile(lambda item: item[0] <= through, index.locations())
        removed = [item for item in leaving if log.known.get(item[0]) != item[1]]
        if not removed:
            return
        log = log.after(removed, epoch=self.epoch)
        # The write is conditional: a superseded consumer that has not noticed it yet must not overwrite the
        # log of its successor. Unless the write is known to have won, the log is read again next time.
        self._dequeued = None
        self._dequeued = log, await self.file.write_side(self.file.dequeued_path, log.raw, version)

    async def _edit(
        self,
        change: Callable[[Snapshot], bytes | None],
        *,
        before: Callable[[Snapshot], Awaitable[None]] | None = None,
        fresh: bool = False,
    ) -> None:
        """Apply an edit to the manifest, and repeat it until it is stored. It must be safe to repeat.

        Start from the last known manifest unless `fresh`. Call `before` ahead of each write.
        """
        backoff = Backoff(self._policy, clock=self._clock, rng=self._rng)
        base = None if fresh else self._snapshot
        while True:
            try:
                base = base or await self.file.read()
                raw = change(base)
                if raw is None:
                    self._adopt(base)
                    return
                if before is not None:
                    await before(base)
                self._adopt(await self._write(raw, base))
                return
            except (errors.Conflict, errors.OutcomeUnknown, errors.Unavailable) as error:
                base = None
                if not await backoff.pause():
                    raise RetriesExhausted(
                        f"writing {self.file.path} did not succeed within "
                        f"{self._policy.deadline_s:g} s: {error}"
                    ) from error
            except errors.PenstockError as error:
                raise storage_error(error, f"writing {self.file.path}") from error

    async def _write(self, raw: bytes, base: Snapshot) -> Snapshot:
        self._manifest_writes.inc()
        try:
            return await self.file.write(raw, base)
        except errors.Conflict:
            self._manifest_conflicts.inc()
            raise

    async def _retrying(self, operation: Callable[[], Awaitable[T]], doing: str) -> T:
        try:
            return await retry(operation, self._policy, clock=self._clock, rng=self._rng)
        except errors.PenstockError as error:
            raise storage_error(error, f"{doing} {self.file.path}") from error

    def _adopt(self, snapshot: Snapshot) -> None:
        if self._snapshot is not snapshot:
            known = self._index
            self._index = (known.grown_into(snapshot.raw) if known else None) or manifest.index(snapshot.raw)
            self._snapshot = snapshot
        self._instruments.queue_length.set(snapshot.footer.entry_count)
        self._instruments.manifest_bytes.set(len(snapshot.raw))

    def _current(self) -> EntryIndex:
        assert self._index is not None
        return self._index

    def require_epoch(self) -> None:
        """Raise `FencedError` if this consumer never held the queue or is known to have lost it."""
        if self._closed:
            raise FencedError(f"the consumer of {self.file.path} is closed: open a new one")
        if self._fenced_by is not None:
            raise self._fenced()
        if self.epoch == UNINITIALISED:
            raise FencedError("the consumer is not initialised: call initialize() first")

    def _check_epoch(self, snapshot: Snapshot) -> None:
        if snapshot.version is None:
            raise FencedError(
                f"{self.file.path} no longer exists: restore it, or open a new consumer on an empty queue"
            )
        epoch = snapshot.footer.epoch
        if epoch == self.epoch:
            return
        if self._sealing is not None and epoch == self._sealing:
            self.epoch, self._sealing = epoch, None
            return
        self._fenced_by = epoch
        raise self._fenced()

    def _fenced(self) -> FencedError:
        return FencedError(
            f"consumer epoch {self.epoch} of {self.file.path} was superseded by epoch {self._fenced_by}: "
            "another consumer took over, stop this one"
        )
