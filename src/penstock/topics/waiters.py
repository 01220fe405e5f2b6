"""Who waits for a topic to change.

A waiter is registered before the first look at the topic, so that a record published between the look and
the wait wakes it: there is no moment in which a wake-up can be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Waiters"]


class Waiters:
    """The waiters of one topic, of which every one is woken once, and its listeners, who are always told."""

    __slots__ = ("_listening", "_waiting")

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._listening: tuple[Callable[[], None], ...] = ()

    def listen(self, tell: Callable[[], None]) -> None:
        """Call this at every change from now on; it must neither wait nor raise."""
        self._listening = (*self._listening, tell)

    def unlisten(self, tell: Callable[[], None]) -> None:
        """No longer call this."""
        self._listening = tuple(other for other in self._listening if other != tell)

    @contextmanager
    def register(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done as soon as the topic changes after this moment."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            yield waiter
        finally:
            self._waiting.discard(waiter)
            waiter.cancel()

    def wake(self) -> None:
        """Something was published, or the topic is gone."""
        if self._waiting:
            woken, self._waiting = self._waiting, set()
            for waiter in woken:
                if not waiter.done():
                    waiter.set_result(None)
        for tell in self._listening:
            tell()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def are_there(self) -> bool:
        """Whether anybody waits or listens."""
        return bool(self._waiting or self._listening)
