"""The flushes: frozen deltas and syncs, one at a time, in their order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from penstock.clock import Clock
from penstock.coordinator.delta import Flusher
from penstock.coordinator.errors import flush_error
from penstock.coordinator.events import Frozen
from penstock.coordinator.instruments import Instruments

__all__ = ["FlushLine"]

D = TypeVar("D")
S = TypeVar("S")


class FlushLine(Generic[D, S]):
    """A line of work for the flusher. What is done is told by the two callbacks, on the loop, in order."""

    def __init__(
        self,
        flusher: Flusher[D, S],
        *,
        waiting_max: int,
        clock: Clock,
        instruments: Instruments,
        flushed: Callable[[Frozen[D], S], None],
        synced: Callable[[], None],
    ) -> None:
        self._flusher = flusher
        self._waiting_max = waiting_max
        self._clock = clock
        self._instruments = instruments
        self._flushed = flushed
        self._synced = synced
        self._line: deque[Frozen[D] | None] = deque()
        """Deltas to flush; None is a sync of everything before it."""
        self._busy = False
        self._running: Frozen[D] | None = None
        self._wake = asyncio.Event()

    @property
    def pending(self) -> list[Frozen[D]]:
        """Frozen deltas that are not flushed yet, oldest first."""
        waiting = [item for item in self._line if item is not None]
        return waiting if self._running is None else [self._running, *waiting]

    @property
    def has_room(self) -> bool:
        """Whether another delta may wait behind the one that is being flushed."""
        return len(self.pending) <= self._waiting_max

    @property
    def idle(self) -> bool:
        return not self._busy and not self._line

    def add(self, frozen: Frozen[D]) -> None:
        """Put a delta at the end of the line."""
        self._line.append(frozen)
        self._note_depth()
        self._wake.set()

    def add_sync(self) -> None:
        """Persist everything that is in the line now. Two in a row are one."""
        if not self._line or self._line[-1] is not None:
            self._line.append(None)
        self._wake.set()

    async def run(self) -> None:
        """Work until cancelled. Raises `FlushError` at the first thing that goes wrong, and is over then."""
        while True:
            while self._line:
                await self._work(self._line.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _work(self, item: Frozen[D] | None) -> None:
        self._busy = True
        if item is None:
            await self._sync()
        else:
            await self._flush(item)

    async def _flush(self, frozen: Frozen[D]) -> None:
        self._running = frozen
        self._note_depth()
        began = self._clock.monotonic()
        self._instruments.event_send_duration.observe(began - frozen.frozen_at_s)
        with _fatal(f"the flush of epochs {frozen.epoch_range}"):
            snapshot = await self._flusher.flush(frozen.delta)
        self._instruments.flush_duration.observe(self._clock.monotonic() - began)
        self._running, self._busy = None, False
        self._flushed(frozen, snapshot)

    async def _sync(self) -> None:
        began = self._clock.monotonic()
        with _fatal("the sync of the storage"):
            await self._flusher.sync()
        self._instruments.sync_duration.observe(self._clock.monotonic() - began)
        self._busy = False
        self._synced()

    def _note_depth(self) -> None:
        self._instruments.event_queue_depth.set(sum(item is not None for item in self._line))


@contextmanager
def _fatal(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise flush_error(doing, error) from error
