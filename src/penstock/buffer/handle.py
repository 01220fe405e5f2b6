"""What `produce` hands back: a way to learn, once or many times, whether the records are durable."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from penstock.buffer.errors import BufferError

__all__ = ["DurabilityWatcher", "WriteHandle", "WriteOutcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOutcome:
    """How a `produce` call ended. On success it tells where the first record is."""

    error: BufferError | None = None
    sequence: int | None = None
    start_index: int | None = None
    location: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class DurabilityWatcher:
    """Settled once by the producer; watched by anybody, any number of times.

    Cancelling one waiter touches neither the write nor the other waiters.
    """

    __slots__ = ("_outcome", "_waiters")

    def __init__(self) -> None:
        self._outcome: WriteOutcome | None = None
        self._waiters: list[asyncio.Future[None]] | None = None

    def result(self) -> WriteOutcome | None:
        """None while pending, then how it ended."""
        return self._outcome

    async def await_durable(self) -> WriteOutcome:
        """Wait until the records are stored and in the queue. Raises the error if they are not."""
        if self._outcome is None:
            waiter = asyncio.get_running_loop().create_future()
            if self._waiters is None:
                self._waiters = []
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if self._waiters is not None:
                    self._waiters.remove(waiter)
        outcome = self._outcome
        assert outcome is not None
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def settle(self, outcome: WriteOutcome) -> None:
        """Decide. Called once, by the producer that made the watcher."""
        self._outcome = outcome
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteHandle:
    """One `produce` call: its watcher and the time stamped on its records."""

    watcher: DurabilityWatcher
    ingestion_time_ms: int
