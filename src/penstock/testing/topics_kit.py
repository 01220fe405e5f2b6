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
import sys
from collections.abc import Callable
from typing import TypeVar

from penstock.errors import PenstockError
from penstock.storage import AppendLog, Entry, GroupCommitter

__all__ = ["InlineCommitter", "InlineCommitters", "InlineWorkers"]

T = TypeVar("T")


class InlineCommitter(GroupCommitter):
    """A `GroupCommitter` without a thread: it commits in the call that submits, or when it is released.

    With `is_quick` it commits in the call that flushes, as over a quick disk. Order, failures and `resume`
    are those of `GroupCommitter`; nothing is synced or prepared later.
    """

    def __init__(
        self, log: AppendLog, deliver: Callable[[list[Entry]], None], *, is_quick: bool = False
    ) -> None:
        super().__init__(log, deliver, queue_max=sys.maxsize)
        self.log = log
        self.held = False
        """Whether entries wait until `commit`."""
        self._is_quick = is_quick

    @property
    def is_quick(self) -> bool:
        return self._is_quick

    @property
    def waiting(self) -> list[Entry]:
        """Entries that were submitted and are not committed yet."""
        return self._held

    @property
    def window_s(self) -> float:
        """How long `widen` lets a commit wait for more."""
        return self._window_s

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def submit(self, entry: Entry, *, hold: bool = False) -> None:
        super().submit(entry, hold=True)
        if not (hold and self._is_quick):
            self.flush()

    def flush(self) -> None:
        """Commit the entries that wait, unless the committer is held."""
        if not self.held:
            self.commit()

    def commit(self) -> None:
        """Commit all entries that wait as one batch."""
        batch, self._held = self._held, []
        self._taken += len(batch)
        if batch:
            self._commit(batch)

    def _plan(self) -> None:
        """Sync nothing later, and prepare no file: the same calls come in the same order each time."""

    def tend(self) -> None:
        """Sync what was only written, then mark it; as in the thread, the next append gets the error."""
        with contextlib.suppress(PenstockError):
            self.log.sync()
            self.log.mark()

    def close(self) -> None:
        """Commit what waits and sync it. Raises what the sync raises."""
        self.held = False
        super().close()


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
