"""Overload control: under load the server delivers later and in larger batches, but delivers everything.

Every 100 ms three signals become one pressure from 0 to 1: the number of topics that wait for delivery, their
waiting time relative to the target of 5 ms, and the fill level of the log's queues. The largest signal
counts, smoothed. As pressure rises, deliveries are batched, commits wait longer for more writes, and low
priorities are deferred. At the highest level, writers are refused with a retry time.

The waiting time is the larger of the measured delivery delay and the delay of the event loop's timer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.clock import Clock
from penstock.topics.errors import Throttled
from penstock.topics.log.wal import WalShard

SAMPLE_MS: Final = 100
_DEPTH_FULL: Final = 256
"""The waiting topics per worker that alone mean full pressure."""
_LATENCY_FULL_MS: Final = 5.0
_SMOOTHING: Final = 0.3
_NOTHING: Final = 0.01
_COALESCE_FROM: Final = 0.2
_COALESCE_MS_MAX: Final = 20.0
_WIDEN_FROM: Final = 0.4
_WINDOW_MS: Final = (0.5, 10.0)
_DEFER_FROM: Final = 0.8
_DEFER_AFTER: Final = 5
"""The number of samples above the mark before work is deferred. Half a second is not a spike."""
_RESUME_BELOW: Final = 0.6
_REFUSE_FROM: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """The load: waiting topics, their recent waiting time, and the fill level of the fullest queue."""

    depth: int
    wait_ms: float
    busy: float
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The measures at a level of overload. They only delay; stored and read data stay the same."""

    pressure: float
    coalesce_ms: float
    """How long a delivery may wait for more records of the same topic."""
    commit_window_ms: float
    """How long a commit may wait for more writes; 0 leaves this to the committer."""
    defers: bool
    """Whether copies move one band lower and topics of negative priority are not pushed.

    Polling still works.
    """
    refuses: bool
    """Whether writes are refused when the log's queue fills up, unless the writer insists."""


CALM: Final = Ladder(pressure=0.0, coalesce_ms=0.0, commit_window_ms=0.0, defers=False, refuses=False)


class Governor:
    """The conversion of samples to a pressure and its measures.

    It has no clock: a sample stands for 100 ms.
    """

    def __init__(self) -> None:
        self.ladder = CALM
        self._high = 0

    def sample(self, signals: Signals) -> Ladder:
        """Add a sample. Return the measures that now apply."""
        now = max(
            signals.depth / (signals.workers * _DEPTH_FULL), signals.wait_ms / _LATENCY_FULL_MS, signals.busy
        )
        before = self.ladder.pressure
        pressure = before + _SMOOTHING * (min(max(now, 0.0), 1.0) - before)
        if pressure < _NOTHING:
            pressure = 0.0
        self._high = self._high + 1 if pressure > _DEFER_FROM else 0
        defers = pressure >= _RESUME_BELOW if self.ladder.defers else self._high >= _DEFER_AFTER
        self.ladder = Ladder(
            pressure=pressure,
            coalesce_ms=_over(_COALESCE_FROM, pressure) * _COALESCE_MS_MAX,
            commit_window_ms=_window_ms(pressure),
            defers=defers,
            refuses=pressure >= _REFUSE_FROM,
        )
        return self.ladder


def _over(start: float, pressure: float) -> float:
    """Return how far the pressure is from `start` to 1, as a fraction."""
    return max(0.0, (pressure - start) / (1.0 - start))


def _window_ms(pressure: float) -> float:
    least, most = _WINDOW_MS
    return least + (most - least) * pressure if pressure > _WIDEN_FROM else 0.0


_LAG_SMOOTHING: Final = 0.2
_FILL_REFUSED: Final = 0.5
"""The fill level above which a queue refuses writers at full pressure."""
_STOOD_STILL_MS: Final = 2000.0
RETRY_AFTER_MS: Final = 1000


class Scheduler:
    """The pressure of one engine. Used only on the event loop's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._governor = Governor()
        self._shards: Sequence[WalShard] = ()
        self._depths: list[Callable[[], int]] = []
        self._wait_ms = 0.0
        self._observed = False
        self._ticking: asyncio.Task[None] | None = None

    @property
    def ladder(self) -> Ladder:
        """Return the measures that apply now."""
        return self._governor.ladder

    @property
    def depth(self) -> int:
        """Return how many topics wait for delivery."""
        return sum(depth() for depth in self._depths)

    def start(self, shards: Sequence[WalShard]) -> None:
        """Start sampling."""
        self._shards = shards
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    def watch(self, depth: Callable[[], int]) -> None:
        """Include another source of waiting topics."""
        self._depths.append(depth)

    def observe(self, wait_ms: float) -> None:
        """Record that a topic was delivered after waiting for `wait_ms`."""
        self._wait_ms += _LAG_SMOOTHING * (wait_ms - self._wait_ms)
        self._observed = True

    def check(self, shard: WalShard) -> None:
        """Raise `Throttled` if a write that does not insist should be retried later."""
        if self._governor.ladder.refuses and shard.fill >= _FILL_REFUSED:
            raise Throttled(
                "the server is overloaded; retry in a moment, or send disable_backpressure",
                {"retry_after_ms": RETRY_AFTER_MS},
            )

    async def _tick(self) -> None:
        while True:
            due_s = self._clock.monotonic() + SAMPLE_MS / 1000
            await self._clock.sleep(SAMPLE_MS / 1000)
            late_ms = (self._clock.monotonic() - due_s) * 1000
            # A longer delay than load can cause means that the whole machine was suspended.
            self.sample(late_ms=late_ms if late_ms < _STOOD_STILL_MS else 0.0)

    def sample(self, *, late_ms: float) -> None:
        """Take one sample. `late_ms` is the delay of the event loop's timer."""
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
