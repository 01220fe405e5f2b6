"""What a database brings: a `Delta` that takes writes in memory, and a `Flusher` that stores it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["Delta", "Flusher"]

W = TypeVar("W")
I = TypeVar("I")  # noqa: E741 - the image
D = TypeVar("D")
S = TypeVar("S")


class Delta(ABC, Generic[W, I]):
    """The writes since the last flush, made of an image and grown by `apply`.

    Only the coordinator changes it.
    After `freeze` a delta is never changed again: the flusher, subscribers and views share it as it is.
    """

    @abstractmethod
    def init(self, image: I) -> None:
        """Start from `image`. Called once, before anything is applied."""

    def apply(self, writes: Sequence[W]) -> Sequence[object]:
        """Apply writes in order and return one result for each.

        An `Exception` among the results refuses that write, of which nothing may be left behind; anything
        else is what the caller's `WriteHandle.result()` returns. Raising breaks the coordinator for good. A
        delta overrides this one when it can take many writes at once, else `apply_one`.
        """
        return [self._attempt(write) for write in writes]

    def apply_one(self, write: W) -> object:
        """Apply one write, all or nothing: check first, then change. Whatever it raises refuses the write."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither apply nor apply_one")

    @abstractmethod
    def estimate_size(self) -> int:
        """How large the writes taken so far are, without the image, in the unit of the configured threshold.

        Asked for after every batch: keep a running sum.
        """

    def fork_image(self) -> I:
        """What the next delta starts from, as a copy that later writes do not change."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither fork_image nor freeze")

    def freeze(self) -> I:
        """End this delta and hand the image over. Nothing is applied to it any more.

        A delta with a large image overrides this and moves it on instead of copying it, keeping for its
        flusher only what it added.
        """
        return self.fork_image()

    def _attempt(self, write: W) -> object:
        try:
            return self.apply_one(write)
        except Exception as error:  # noqa: BLE001 - it is handed to the caller of this write
            return error


class Flusher(ABC, Generic[D, S]):
    """Stores deltas. Flushes never overlap, and deltas come in the order of their epochs.

    Syncs do not overlap either, but one may run while the next delta is flushed.
    """

    @abstractmethod
    async def flush(self, delta: D) -> S:
        """Store `delta` in one atomic step, without changing it, and return a snapshot that shows it.

        An error is fatal: the coordinator stops, because the batch may have been stored. A flusher that keeps
        state of its own changes it after the storage has answered, never before.
        """

    @abstractmethod
    async def sync(self) -> None:
        """Return when all deltas whose `flush` returned before this call are persisted. An error is fatal."""
