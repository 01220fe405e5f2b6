"""An event log without threads: every commit and every piece of blocking work is done where it is asked for.

    disk, clock = FakeDisk(clock=(clock := ManualClock())), clock
    committers = InlineCommitters()
    engine = await Engine.open(
        EngineConfig(data_dir="/data"), fs=disk, clock=clock, workers=InlineWorkers(), committers=committers
    )

With these, an engine on a `FakeDisk` does the same file calls in the same order each time, and a power cut
reaches whoever made the call that it struck. Outcomes still arrive through the event loop, in order, as they
do from a real commit thread; `hold` and `release` decide when.
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
    """Commits the entries of one log in the call that submits them, or all together when it is let go.

    With `is_quick` it is one over a quick disk: it commits in the call that hands entries over.
    Everything else is as with `penstock.storage.GroupCommitter`: order, failures, `resume`.
    """

    def __init__(
        self, log: AppendLog, deliver: Callable[[list[Entry]], None], *, is_quick: bool = False
    ) -> None:
        self.log = log
        self.held = False
        self.is_quick = is_quick
        self.waiting: list[Entry] = []
        """Entries that were submitted and are not committed yet."""
        self._deliver = deliver
        self._generation = 0
        self._failed = -1
        self._failure: PenstockError | None = None
        self._closed = False
        self._totals = {"entries": 0, "frames": 0, "batches": 0, "bytes": 0, "failures": 0}
        self._peak = 0
        self.window_s = 0.0

    def start(self) -> None:
        """There is nothing to start."""

    def submit(self, entry: Entry, *, hold: bool = False) -> None:
        """Commit an entry now, or when the committer is let go."""
        entry.generation = self._generation
        self.waiting.append(entry)
        self._peak = max(self._peak, len(self.waiting))
        if not (self.held or (hold and self.is_quick)):
            self.commit()

    def flush(self) -> None:
        """Commit what waits, but for what `held` keeps."""
        if not self.held:
            self.commit()

    def widen(self, window_s: float) -> None:
        """Nothing ever waits for company here; what was asked for is kept for whoever looks."""
        self.window_s = window_s

    def commit(self) -> None:
        """Commit everything that waits as one batch."""
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
        """What a commit thread does when nobody waits: sync what was only written, then vouch for it.

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
        """Commit what waits and sync it. Raises what the sync raises."""
        if not self._closed:
            self._closed = True
            self.commit()
        self.log.sync()
        with contextlib.suppress(PenstockError):
            self.log.mark()


class InlineCommitters:
    """Makes an `InlineCommitter` for every shard of an engine, and has them at hand."""

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
        """Keep what is submitted from now on."""
        for committer in self.all:
            committer.held = True

    def release(self) -> None:
        """Commit what was kept, one batch per shard, and no longer keep anything."""
        for committer in self.all:
            committer.held = False
            committer.commit()

    def tend(self) -> None:
        """Make every log durable and vouch for it."""
        for committer in self.all:
            committer.tend()


class InlineWorkers:
    """Blocking work is done at once, on the event loop; while held, it waits for its turn."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self._gate.set()
        self.waiting = 0
        """How many pieces of work wait."""

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
        """Keep work waiting from now on."""
        self._gate.clear()

    def release(self) -> None:
        """Let it go, in the order in which it came."""
        self._gate.set()

    def close(self) -> None:
        """There is nothing to end."""
