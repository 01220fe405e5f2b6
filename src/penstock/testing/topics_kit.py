"""An event log without threads: every commit and all blocking work run in the call that requests them.

    disk, clock = FakeDisk(clock=(clock := ManualClock())), clock
    committers = InlineCommitters()
    engine = await Engine.open(
        EngineConfig(data_dir="/data"), fs=disk, clock=clock, workers=InlineWorkers(), committers=committers
    )

An engine on a `FakeDisk` then makes the same file calls in the same order each time, and a power failure is
raised to the caller of the operation that it interrupted. Outcomes still arrive through the event loop, in
order, as they do from a real commit thread; `hold` and `release` decide when.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import PenstockError
from penstock.storage import AppendLog, CommitStats, Entry, commit_entries

__all__ = ["InlineCommitter", "InlineCommitters", "InlineWorkers"]

T = TypeVar("T")


class InlineCommitter:
    """Commits the entries of one log in the call that submits them, or all together in `release`.

    With `is_quick` it behaves as on a quick disk: it commits in the call that flushes entries. Order,
    failures and `resume` are those of `penstock.storage.GroupCommitter`.
    """

    def __init__(
        self, log: AppendLog, deliver: Callable[[list[Entry]], None], *, is_quick: bool = False
    ) -> None:
        self.log = log
        self.held = False
        self.is_quick = is_quick
        self.waiting: list[Entry] = []
        """The number of entries that are submitted and not committed yet."""
        self._deliver = deliver
        self._generation = 0
        self._failed = -1
        self._failure: PenstockError | None = None
        self._closed = False
        self._totals = {"entries": 0, "frames": 0, "batches": 0, "bytes": 0, "failures": 0}
        self._peak = 0
        self.window_s = 0.0

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def submit(self, entry: Entry, *, hold: bool = False) -> None:
        """Commit an entry now, or when the committer is released."""
        entry.generation = self._generation
        self.waiting.append(entry)
        self._peak = max(self._peak, len(self.waiting))
        if not (self.held or (hold and self.is_quick)):
            self.commit()

    def flush(self) -> None:
        """Commit waiting entries, except while `held`."""
        if not self.held:
            self.commit()

    def widen(self, window_s: float) -> None:
        """Record the requested window; nothing waits here."""
        self.window_s = window_s

    def commit(self) -> None:
        """Commit all waiting entries as one batch."""
        batch, self.waiting = self.waiting, []
        going = [entry for entry in batch if entry.generation > self._failed]
        for entry in batch[: len(batch) - len(going)]:
            entry.error = self._failure
        if going:
            self._write(going)
        if batch:
            self._deliver(batch)

    def _write(self, entries: list[Entry]) -> None:
        failure = commit_entries(self.log, entries)
        if failure is not None:
            self._failed, self._failure = entries[-1].generation, failure
            self._totals["failures"] += 1
        done = [entry for entry in entries if entry.error is None]
        self._totals["batches"] += 1
        self._totals["entries"] += len(done)
        self._totals["frames"] += sum(entry.frame_count for entry in done)
        self._totals["bytes"] += sum(entry.byte_count for entry in done)

    def tend(self) -> None:
        """Do what a commit thread does when it is idle: sync what was only written, then mark it.

        An error is kept for the next append, as there.
        """
        with contextlib.suppress(PenstockError):
            self.log.sync()
            self.log.mark()

    def resume(self) -> int:
        self._generation += 1
        return self._generation

    def stats(self) -> CommitStats:
        return CommitStats(
            **self._totals,
            submit_full=0,
            syncs=self.log.syncs,
            rotations=self.log.rotations,
            queue_depth=len(self.waiting),
            queue_peak=self._peak,
        )

    def close(self) -> None:
        """Commit waiting entries and sync them. Raises the error of the sync."""
        if not self._closed:
            self._closed = True
            self.commit()
        self.log.sync()
        with contextlib.suppress(PenstockError):
            self.log.mark()


class InlineCommitters:
    """Creates an `InlineCommitter` for every shard of an engine, and keeps them accessible."""

    def __init__(self, *, are_quick: bool = False) -> None:
        self._are_quick = are_quick
        self.all: list[InlineCommitter] = []

    def __call__(
        self, log: AppendLog, deliver: Callable[[list[Entry]], None], number: int
    ) -> InlineCommitter:
        committer = InlineCommitter(log, deliver, is_quick=self._are_quick)
        self.all.append(committer)
        return committer

    def hold(self) -> None:
        """Hold all entries that are submitted from now on."""
        for committer in self.all:
            committer.held = True

    def release(self) -> None:
        """Commit held entries, one batch per shard, and stop holding."""
        for committer in self.all:
            committer.held = False
            committer.commit()

    def tend(self) -> None:
        """Make every log durable and mark it."""
        for committer in self.all:
            committer.tend()


class InlineWorkers:
    """Runs blocking work immediately, on the event loop; while held, the work waits."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self._gate.set()
        self.waiting = 0
        """The number of waiting pieces of work."""

    async def tidy(self, work: Callable[[], T]) -> T:
        return await self._do(work)

    async def fetch(self, work: Callable[[], T]) -> T:
        return await self._do(work)

    async def _do(self, work: Callable[[], T]) -> T:
        self.waiting += 1
        try:
            await self._gate.wait()
        finally:
            self.waiting -= 1
        return work()

    def hold(self) -> None:
        """Hold work from now on."""
        self._gate.clear()

    def release(self) -> None:
        """Run held work in the order of submission, and stop holding."""
        self._gate.set()

    def close(self) -> None:
        """Do nothing: there is no thread."""
