"""An event log without threads: every commit and every blocking operation runs in the calling task.

    disk, clock = FakeDisk(clock=(clock := ManualClock())), clock
    committers = InlineCommitters()
    engine = await Engine.open(
        EngineConfig(data_dir="/data"), fs=disk, clock=clock, workers=InlineWorkers(), committers=committers
    )

With these, an engine on a `FakeDisk` makes the same file calls in the same order each time, and a simulated
power failure is raised in the task that made the call. Outcomes still arrive through the event loop, in
order, as from a real commit thread. `hold` and `release` decide when.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import PenstockError
from penstock.storage import AppendLog, Entry, GroupCommitter

__all__ = ["InlineCommitter", "InlineCommitters", "InlineWorkers"]

T = TypeVar("T")


class InlineCommitter(GroupCommitter):
    """A `GroupCommitter` without a thread: it commits in the call that submits, or when it is released.

    With `is_quick` it commits in the call of `flush`, as on a quick disk. Order, failures and `resume` are
    those of `GroupCommitter`. No syncs or files are scheduled for later.
    """

    def __init__(
        self, log: AppendLog, deliver: Callable[[list[Entry]], None], *, is_quick: bool = False
    ) -> None:
        super().__init__(log, deliver, queue_max=sys.maxsize)
        self.log = log
        self.held = False
        """Whether entries wait for `commit`."""
        self._is_quick = is_quick

    @property
    def is_quick(self) -> bool:
        return self._is_quick

    @property
    def waiting(self) -> list[Entry]:
        """The entries that were submitted but are not committed yet."""
        return self._held

    @property
    def window_s(self) -> float:
        """How long a commit may wait for more entries, as set by `widen`."""
        return self._window_s

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def submit(self, entry: Entry, *, hold: bool = False) -> None:
        super().submit(entry, hold=True)
        if not (hold and self._is_quick):
            self.flush()

    def flush(self) -> None:
        """Commit the waiting entries, unless the committer is held."""
        if not self.held:
            self.commit()

    def commit(self) -> None:
        """Commit all waiting entries as one batch."""
        batch, self._held = self._held, []
        self._taken += len(batch)
        if batch:
            self._commit(batch)

    def _plan(self) -> None:
        """Schedule no sync and prepare no file, so that the file calls have the same order each time."""

    def tend(self) -> None:
        """Sync and mark written entries. As in the thread, the next append raises an error of the sync."""
        with contextlib.suppress(PenstockError):
            self.log.sync()
            self.log.mark()

    def close(self) -> None:
        """Commit and sync the waiting entries. Raise the error of the sync."""
        self.held = False
        super().close()


class InlineCommitters:
    """Creates an `InlineCommitter` for every shard of an engine, and keeps all of them."""

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
        """Hold the entries that are submitted from now on."""
        for committer in self.all:
            committer.held = True

    def release(self) -> None:
        """Commit the held entries, one batch per shard, and stop holding."""
        for committer in self.all:
            committer.held = False
            committer.commit()

    def tend(self) -> None:
        """Sync and mark every log."""
        for committer in self.all:
            committer.tend()


class InlineWorkers:
    """Runs blocking work immediately, on the event loop. While held, the work waits."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self._gate.set()
        self.waiting = 0
        """The number of waiting calls."""

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
        """Hold the work that is submitted from now on."""
        self._gate.clear()

    def release(self) -> None:
        """Run the held work, in the order of its submission."""
        self._gate.set()

    def close(self) -> None:
        """Do nothing: there are no threads."""
