"""The bound on what a producer holds: bytes not yet durable, and calls not yet taken into a batch."""

from __future__ import annotations

import asyncio
import sys
from collections import deque

__all__ = ["Admission"]


class Admission:
    """First come, first served. A call larger than the whole bound is let in alone."""

    def __init__(self, *, bytes_max: int, calls_max: int) -> None:
        self._bytes_max = bytes_max
        self._calls_max = calls_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.bytes_held = 0
        self.calls_waiting = 0

    async def enter(self, size: int) -> None:
        """Wait for room, then hold `size` bytes and one call slot."""
        if not self._waiting and self._fits(size):
            self._take(size)
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (size, ticket)
        self._waiting.append(place)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                # Let in and cancelled at the same moment: give the room back.
                self.leave_queue()
                self.release(size)
            else:
                # Somebody who made room at this moment may have dropped the ticket already.
                if place in self._waiting:
                    self._waiting.remove(place)
                self._let_in()
            raise

    def leave_queue(self, calls: int = 1) -> None:
        """`calls` were taken into a batch: their slots are free again, their bytes are not."""
        self.calls_waiting -= calls
        self._let_in()

    def release(self, size: int) -> None:
        """`size` bytes are durable, or were given up."""
        self.bytes_held -= size
        self._let_in()

    def dismiss(self) -> None:
        """Let everybody in: the caller has stopped taking work and turns them away itself."""
        self._bytes_max = self._calls_max = sys.maxsize
        self._let_in()

    def _fits(self, size: int) -> bool:
        if self.calls_waiting >= self._calls_max:
            return False
        return self.bytes_held == 0 or self.bytes_held + size <= self._bytes_max

    def _take(self, size: int) -> None:
        self.bytes_held += size
        self.calls_waiting += 1

    def _let_in(self) -> None:
        while self._waiting:
            size, ticket = self._waiting[0]
            if ticket.cancelled():
                self._waiting.popleft()
                continue
            if not self._fits(size):
                return
            self._waiting.popleft()
            self._take(size)
            ticket.set_result(None)
