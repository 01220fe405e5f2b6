"""Waiting for news, in threads and on event loops, without missing any."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from penstock.clock import Clock

__all__ = ["Bell"]


class Bell:
    """Rung when something changed. Threads wait under the lock; tasks listen first, then look, then wait.

    A thread that waits gives the lock up in the same step, so whoever changes something under the lock and
    rings is heard. A task cannot: it has to be listening before it looks.
    """

    def __init__(self, lock: threading.RLock, clock: Clock) -> None:
        self._lock = lock
        self._clock = clock
        self._changed = threading.Condition(lock)
        self._listening: dict[asyncio.Future[None], asyncio.AbstractEventLoop] = {}

    def ring(self) -> None:
        """Wake everybody who waits or listens. The caller holds the lock."""
        self._changed.notify_all()
        for heard, loop in self._listening.items():
            # A loop that was closed has nobody left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_set, heard)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for the next ring, or for the time to pass. The caller holds the lock."""
        self._changed.wait(timeout_s)

    @contextlib.contextmanager
    def listening(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done once the bell rang after this moment."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._listening[heard] = loop
        try:
            yield heard
        finally:
            with self._lock:
                self._listening.pop(heard, None)
            heard.cancel()

    async def wait_async(self, heard: asyncio.Future[None], timeout_s: float | None) -> None:
        """Wait until it was heard, or for the time to pass."""
        if timeout_s is None:
            await heard
            return
        timer = asyncio.ensure_future(self._clock.sleep(timeout_s))
        try:
            await asyncio.wait([heard, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()


def _set(heard: asyncio.Future[None]) -> None:
    if not heard.done():
        heard.set_result(None)
