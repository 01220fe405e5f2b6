"""The governor at work: it looks every 100 ms, and hands what it finds to those whom it concerns.

What it looks at is real: how late the event loop comes to a timer, how long topics waited for their delivery,
how many still wait, and how full the queues of the log are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from penstock.clock import Clock
from penstock.topics.errors import Throttled
from penstock.topics.log.wal import Shard
from penstock.topics.pressure import SAMPLE_MS, Governor, Ladder, Signals

__all__ = ["RETRY_AFTER_MS", "Scheduler"]

_SMOOTHING: Final = 0.2
_FILL_REFUSED: Final = 0.5
"""At full pressure writers are sent away from a queue that is fuller than this."""
_STOOD_STILL_MS: Final = 2000.0
RETRY_AFTER_MS: Final = 1000


class Scheduler:
    """The pressure of one engine. Belongs to the event loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._governor = Governor()
        self._shards: Sequence[Shard] = ()
        self._depths: list[Callable[[], int]] = []
        self._wait_ms = 0.0
        self._observed = False
        self._ticking: asyncio.Task[None] | None = None

    @property
    def ladder(self) -> Ladder:
        """What is to be done about the pressure now."""
        return self._governor.ladder

    @property
    def depth(self) -> int:
        """How many topics wait to be delivered."""
        return sum(depth() for depth in self._depths)

    def start(self, shards: Sequence[Shard]) -> None:
        """Begin to look."""
        self._shards = shards
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    def watch(self, depth: Callable[[], int]) -> None:
        """Count what waits there as well."""
        self._depths.append(depth)

    def observe(self, wait_ms: float) -> None:
        """A topic was delivered after it had waited so long."""
        self._wait_ms += _SMOOTHING * (wait_ms - self._wait_ms)
        self._observed = True

    def check(self, shard: Shard) -> None:
        """Raises `Throttled` where a write that does not insist should come back later."""
        if self._governor.ladder.refuses and shard.fill >= _FILL_REFUSED:
            raise Throttled(
                "the server is pressed hard; retry in a moment, or send disable_backpressure",
                {"retry_after_ms": RETRY_AFTER_MS},
            )

    async def _tick(self) -> None:
        while True:
            due_s = self._clock.monotonic() + SAMPLE_MS / 1000
            await self._clock.sleep(SAMPLE_MS / 1000)
            late_ms = (self._clock.monotonic() - due_s) * 1000
            # Later than any load makes it, the whole machine stood still.
            self.sample(late_ms=late_ms if late_ms < _STOOD_STILL_MS else 0.0)

    def sample(self, *, late_ms: float) -> None:
        """Look once; `late_ms` is how late the loop was for it."""
        if not self._observed:
            self._wait_ms /= 2
        self._observed = False
        before = self.ladder.commit_window_ms
        busy = max((shard.fill for shard in self._shards), default=0.0)
        ladder = self._governor.sample(
            Signals(depth=self.depth, wait_ms=max(self._wait_ms, late_ms), busy=busy)
        )
        if ladder.commit_window_ms != before:
            for shard in self._shards:
                shard.widen(ladder.commit_window_ms / 1000)
