"""The retry loop: full jitter between a floor and a ceiling, with a deadline."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.clock import Clock
from penstock.errors import PenstockError, Unavailable

__all__ = ["Backoff", "RetryPolicy", "retry"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How long to retry, and the waits between attempts.

    The n-th wait is drawn uniformly from `[0, min(ceiling_s, floor_s * 2**n)]` (full jitter), so that
    competing writers spread out.
    """

    floor_s: float = 0.005
    ceiling_s: float = 1.0
    deadline_s: float = 60.0

    def wait_s(self, attempts: int, rng: random.Random) -> float:
        """Return a random wait before the next attempt; `attempts` counts the earlier waits."""
        return rng.uniform(0.0, min(self.ceiling_s, self.floor_s * 2.0 ** min(attempts, 30)))


class Backoff:
    """The waits of one operation under a `RetryPolicy`.

    `await pause()` waits and returns True, or returns False without waiting if the deadline would pass.
    """

    __slots__ = ("_clock", "_deadline", "_policy", "_rng", "attempts")

    def __init__(self, policy: RetryPolicy, *, clock: Clock, rng: random.Random) -> None:
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._deadline = clock.monotonic() + policy.deadline_s
        self.attempts = 0

    async def pause(self) -> bool:
        """Wait before the next attempt. Return False without waiting if no time is left for another one."""
        wait_s = self._policy.wait_s(self.attempts, self._rng)
        self.attempts += 1
        if self._clock.monotonic() + wait_s >= self._deadline:
            return False
        await self._clock.sleep(wait_s)
        return True


async def retry(
    operation: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    *,
    clock: Clock,
    rng: random.Random,
    on: tuple[type[PenstockError], ...] = (Unavailable,),
) -> T:
    """Run `operation` until it returns, raises an error outside `on`, or reaches the deadline.

    Use it only for operations that are safe to repeat. Raise the last error unchanged.
    """
    backoff = Backoff(policy, clock=clock, rng=rng)
    while True:
        try:
            return await operation()
        except on:
            if not await backoff.pause():
                raise
