"""Appending to the manifest: one conditional write for all finished batches, and never twice."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from penstock import errors
from penstock.buffer import manifest
from penstock.buffer.attempt import Attempt, Fate, judge, judge_by_ledger
from penstock.buffer.errors import (
    BufferError,
    ManifestFull,
    OutcomeUnknown,
    RetriesExhausted,
    SerializationError,
    storage_error,
)
from penstock.buffer.floor import NO_FLOOR, Floor, read_floor
from penstock.buffer.instruments import Instruments
from penstock.buffer.ledger import read_ledger
from penstock.buffer.manifest import NewEntry
from penstock.buffer.manifest_file import ManifestFile, Snapshot
from penstock.clock import Clock
from penstock.retry import Backoff, RetryPolicy
from penstock.units import format_size

__all__ = ["QueueProducer", "Upload"]

T = TypeVar("T")

CONTENDED_READS = 3
"""After a conflict this many reads must find the manifest unchanged before the cached one is used again."""


class Upload(Protocol):
    """A stored batch on its way into the queue."""

    def entry(self) -> NewEntry:
        """What to append: the present location and the metadata."""
        ...

    def is_stale(self, floor_ms: int) -> bool:
        """Whether the object may be collected before it is referenced, and must be stored anew."""
        ...

    async def relocate(self, floor_ms: int) -> None:
        """Store the same bytes again under a name minted after `floor_ms`."""
        ...


class QueueProducer:
    """Keeps the last manifest it wrote, so that an append nobody contends for needs no read at all."""

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
        self._cached: Snapshot | None = None
        self._floor: tuple[int, Floor] | None = None
        self._open_attempts: list[Attempt] = []
        self._contended = 0
        self.writes = 0
        self.conflicts = 0

    @property
    def floor_ms(self) -> int:
        """The highest floor seen; names must be minted above it."""
        return self._floor[1].floor_ms if self._floor else NO_FLOOR.floor_ms

    @property
    def in_doubt(self) -> bool:
        """Whether the append now under way, should it be abandoned, may be in the queue."""
        return bool(_doubtful(self._open_attempts))

    async def append(self, uploads: Sequence[Upload]) -> Attempt:
        """Append all batches in order, in one write; returns the attempt that landed.

        Raises `OutcomeUnknown` if they may be in the queue and that cannot be found out; any other
        error means that they are not and never will be.
        """
        landed = await self.append_unless(uploads, _never)
        assert landed is not None
        return landed

    async def append_unless(
        self, uploads: Sequence[Upload], done: Callable[[Snapshot], Awaitable[bool]]
    ) -> Attempt | None:
        """As `append`, unless `done` says of the manifest about to be replaced that there is nothing to do.

        It is asked again for every attempt: what it said about one manifest means nothing for the next.
        """
        open_attempts = self._open_attempts = []
        try:
            return await self._append(uploads, open_attempts, done)
        except BufferError as error:
            if isinstance(error, OutcomeUnknown) or not _doubtful(open_attempts):
                raise
            raise self._unknown(_doubtful(open_attempts), error) from error
        except errors.PenstockError as error:
            if doubtful := _doubtful(open_attempts):
                raise self._unknown(doubtful, error) from error
            raise storage_error(error, f"appending to {self._file.path}") from error

    async def _append(
        self,
        uploads: Sequence[Upload],
        open_attempts: list[Attempt],
        done: Callable[[Snapshot], Awaitable[bool]],
    ) -> Attempt | None:
        backoff = Backoff(self._policy, clock=self._clock, rng=self._rng)
        while True:
            try:
                snapshot = await self._base()
                landed = await self._settle(open_attempts, snapshot)
                if landed is not None:
                    self._cached = snapshot
                    return landed
                if await done(snapshot):
                    self._cached = snapshot
                    return None
                await self._freshen(uploads, snapshot)
                return await self._attempt(uploads, snapshot, open_attempts)
            except ManifestFull:
                if self._cached is None:
                    raise
                self._cached = None  # full as we remember it: the consumer may have made room since
            except (errors.Conflict, errors.OutcomeUnknown, errors.Unavailable) as error:
                if isinstance(error, BufferError):
                    raise
                self._cached = None
                if not await backoff.pause():
                    return await self._last_look(open_attempts, error)

    async def _base(self) -> Snapshot:
        """The manifest to append to: the cached one while nobody else writes, else a fresh one."""
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
                f"{format_size(self._manifest_bytes_max)}: its consumer is not running or too far behind"
            )
        attempt = Attempt(
            base=base.version,
            first=base.footer.next_sequence,
            locations=tuple(entry.location for entry in entries),
        )
        open_attempts.append(attempt)
        self.writes += 1
        self._instruments.manifest_writes.inc(role="producer")
        try:
            written = await self._file.write(raw, base)
        except errors.Conflict as conflict:
            self.conflicts += 1
            self._contended = CONTENDED_READS
            if conflict.definite:
                open_attempts[-1] = replace(attempt, refused=True)
            self._instruments.manifest_conflicts.inc(role="producer")
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
        """Look for every earlier attempt; returns the one that landed, if any.

        Attempts that can no longer land are forgotten. One that the store refused for certain is looked for
        too (a proxy may have sent it twice), but it is never in doubt.
        Raises `OutcomeUnknown` when one cannot be judged.
        """
        undecided: list[Attempt] = []
        for attempt in tuple(open_attempts):
            fate = judge(attempt, snapshot.raw, snapshot.version)
            if fate is Fate.DEQUEUED:
                ledger: dict[int, str] = await self._read_side(self._file.ledger_path, read_ledger, {})
                fate = judge_by_ledger(attempt, ledger)
                if fate is not Fate.DEQUEUED:
                    self._instruments.append_unknown.inc(resolved="true")
            if attempt.refused and fate is not Fate.LANDED:
                fate = Fate.LOST
            if fate is Fate.LANDED:
                open_attempts.clear()
                return attempt
            if fate is Fate.DEQUEUED:
                undecided.append(attempt)
            if fate is Fate.LOST:
                open_attempts.remove(attempt)
        if undecided:
            raise self._unknown(undecided, None)
        return None

    async def _freshen(self, uploads: Sequence[Upload], snapshot: Snapshot) -> None:
        """Steps b and c of `penstock.buffer.floor`: after the manifest was read, before it is written."""
        epoch = snapshot.footer.epoch
        if self._floor is None or self._floor[0] != epoch:
            self._floor = (epoch, await self._read_side(self._file.floor_path, read_floor, NO_FLOOR))
        for upload in uploads:
            if upload.is_stale(self.floor_ms):
                self._instruments.reuploads.inc()
                await upload.relocate(self.floor_ms)

    async def _read_side(self, path: str, decode: Callable[[bytes], T], absent: T) -> T:
        """A side object. One that does not decode is read once more: it may have been cut short."""
        raw, _ = await self._file.read_side(path)
        try:
            return absent if raw is None else decode(raw)
        except SerializationError:
            raw, _ = await self._file.read_side(path)
            return absent if raw is None else decode(raw)

    async def _last_look(self, open_attempts: list[Attempt], last_error: errors.PenstockError) -> Attempt:
        """The deadline passed: whatever can still be found out decides what the caller is told."""
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


async def _never(snapshot: Snapshot) -> bool:
    return False
