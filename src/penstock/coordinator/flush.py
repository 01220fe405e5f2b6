"""The interfaces of a database, `Delta` and `Flusher`, and the queue that runs its flushes.

Flushes run one at a time, in order. Syncs run one at a time, in parallel with the next flush.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from penstock.clock import Clock
from penstock.coordinator.errors import flush_error
from penstock.coordinator.events import Frozen
from penstock.coordinator.watermarks import Instruments

W = TypeVar("W")
I = TypeVar("I")  # noqa: E741 - the image
D = TypeVar("D")
S = TypeVar("S")


class Delta(ABC, Generic[W, I]):
    """The writes since the last flush, in memory: initialised from an image and extended by `apply`.

    Only the coordinator changes it. It never changes after `freeze`, so the flusher, subscribers and views
    can share it.
    """

    @abstractmethod
    def init(self, image: I) -> None:
        """Start from `image`. Called once, before anything is applied."""

    def apply(self, writes: Sequence[W]) -> Sequence[object]:
        """Apply writes in order and return one result for each.

        An `Exception` among the results refuses that write, which must leave the delta unchanged.
        `WriteHandle.result()` returns any other result to the caller. Raising stops the coordinator
        permanently. Override this method if the delta can apply many writes together, otherwise `apply_one`.
        """
        return [self._attempt(write) for write in writes]

    def apply_one(self, write: W) -> object:
        """Apply one write completely or not at all: check it first, then change the delta. Any exception
        refuses it."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither apply nor apply_one")

    @abstractmethod
    def estimate_size(self) -> int:
        """Return the size of the writes applied so far, without the image, in the unit of the threshold.

        Called after every batch: keep a running sum.
        """

    def fork_image(self) -> I:
        """Return the image for the next delta, as a copy that later writes do not change."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither fork_image nor freeze")

    def freeze(self) -> I:
        """End this delta and return the image for the next one. No write is applied to this delta afterwards.

        Override this in a delta with a large image to move the image instead of copying it. Such a delta
        keeps only its own additions for the flusher.
        """
        return self.fork_image()

    def _attempt(self, write: W) -> object:
        try:
            return self.apply_one(write)
        except Exception as error:  # noqa: BLE001 - the caller of this write gets it
            return error


class Flusher(ABC, Generic[D, S]):
    """Interface that stores deltas. Flushes never overlap, and deltas arrive in the order of their epochs.

    Syncs do not overlap either, but one may run during the next flush.
    """

    @abstractmethod
    async def flush(self, delta: D) -> S:
        """Store `delta` in one atomic step, without changing it, and return a snapshot that shows it.

        An error is fatal: the coordinator stops, because the batch may have been stored. A flusher with
        internal state must change it only after the storage has answered.
        """

    @abstractmethod
    async def sync(self) -> None:
        """Return when all deltas whose `flush` returned before this call are persisted. An error is fatal."""


class FlushQueue(Generic[D, S]):
    """Queue of flushes and syncs. The callbacks `flushed` and `synced` run on the loop, in order."""

    def __init__(
        self,
        flusher: Flusher[D, S],
        *,
        waiting_max: int,
        clock: Clock,
        instruments: Instruments,
        flushed: Callable[[Frozen[D], S], None],
        synced: Callable[[int], None],
    ) -> None:
        self._flusher = flusher
        self._waiting_max = waiting_max
        self._clock = clock
        self._instruments = instruments
        self._flushed = flushed
        self._synced = synced
        self._items: deque[Frozen[D] | None] = deque()
        """Deltas to flush. None requests a sync of all deltas before it."""
        self._running: Frozen[D] | None = None
        self._wake = asyncio.Event()
        self._flushed_to = 0
        self._sync_due = False
        self._syncing = False
        self._flush_began_s: float | None = None
        self._sync_began_s: float | None = None
        self._sync_wake = asyncio.Event()
        self._sync_begun = asyncio.Event()

    @property
    def pending(self) -> list[Frozen[D]]:
        """Frozen deltas that are not flushed yet, oldest first."""
        waiting = [item for item in self._items if item is not None]
        return waiting if self._running is None else [self._running, *waiting]

    @property
    def has_room(self) -> bool:
        """Whether another delta may wait for the flush in progress."""
        return len(self.pending) <= self._waiting_max

    @property
    def idle(self) -> bool:
        return self._running is None and not self._items and not self._sync_due and not self._syncing

    @property
    def wait_s(self) -> float:
        """How long the flush or sync in progress has taken so far, in seconds; 0 if there is none."""
        began = [at_s for at_s in (self._flush_began_s, self._sync_began_s) if at_s is not None]
        return self._clock.monotonic() - min(began) if began else 0.0

    def add(self, frozen: Frozen[D]) -> None:
        """Queue a delta for its flush."""
        self._items.append(frozen)
        self._note_depth()
        self._wake.set()

    def add_sync(self) -> None:
        """Queue a sync of everything queued before it. Consecutive syncs are merged."""
        if not self._items or self._items[-1] is not None:
            self._items.append(None)
        self._wake.set()

    async def run(self) -> None:
        """Flush until cancelled. Raise the first error as `FlushError`."""
        while True:
            while self._items:
                item = self._items[0]
                if item is not None:
                    await self._flush(item)
                else:
                    await self._hand_over_sync()
            self._wake.clear()
            await self._wake.wait()

    async def run_syncs(self) -> None:
        """Sync until cancelled. Raises the same errors as `run`."""
        while True:
            while self._sync_due:
                await self._sync()
            self._sync_wake.clear()
            await self._sync_wake.wait()

    async def _hand_over_sync(self) -> None:
        # At most one sync waits for the running one, so a storage that cannot keep up also delays the
        # flushes.
        while self._sync_due:
            self._sync_begun.clear()
            await self._sync_begun.wait()
        self._items.popleft()
        self._sync_due = True
        self._sync_wake.set()
        await asyncio.sleep(0)  # callers wait for the sync: start it before the next flush occupies the loop

    async def _flush(self, frozen: Frozen[D]) -> None:
        self._running = frozen
        self._items.popleft()
        self._note_depth()
        began = self._flush_began_s = self._clock.monotonic()
        self._instruments.event_send_duration.observe(began - frozen.frozen_at_s)
        with _fatal(f"the flush of epochs {frozen.epoch_range}"):
            snapshot = await self._flusher.flush(frozen.delta)
        self._instruments.flush_duration.observe(self._clock.monotonic() - began)
        self._running = self._flush_began_s = None
        self._flushed_to = frozen.epoch_range.hi
        self._flushed(frozen, snapshot)

    async def _sync(self) -> None:
        """Sync, then report everything flushed before the sync began as durable."""
        began, upto = self._clock.monotonic(), self._flushed_to
        self._sync_due, self._syncing, self._sync_began_s = False, True, began
        self._sync_begun.set()
        with _fatal("the sync of the storage"):
            await self._flusher.sync()
        self._instruments.sync_duration.observe(self._clock.monotonic() - began)
        self._syncing, self._sync_began_s = False, None
        self._synced(upto)

    def _note_depth(self) -> None:
        self._instruments.event_queue_depth.set(sum(item is not None for item in self._items))


@contextmanager
def _fatal(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise flush_error(doing, error) from error
