"""The one retry loop: full jitter between a floor and a ceiling, and a deadline."""

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
    """How long to keep trying, and how far apart.

    The n-th wait is drawn uniformly from `[0, min(ceiling_s, floor_s * 2**n)]` (full jitter), so
    that contenders spread out instead of meeting again.
    """

    floor_s: float = 0.005
    ceiling_s: float = 1.0
    deadline_s: float = 60.0

    def wait_s(self, attempts: int, rng: random.Random) -> float:
        """How long to wait after so many attempts before this one."""
        return rng.uniform(0.0, min(self.ceiling_s, self.floor_s * 2.0 ** min(attempts, 30)))


class Backoff:
    """One operation's way through a `RetryPolicy`.

    `await pause()` waits and returns True, or returns False at once when the deadline would pass.
    """

    __slots__ = ("_clock", "_deadline", "_policy", "_rng", "attempts")

    def __init__(self, policy: RetryPolicy, *, clock: Clock, rng: random.Random) -> None:
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._deadline = clock.monotonic() + policy.deadline_s
        self.attempts = 0

    async def pause(self) -> bool:
        """Wait before the next attempt; False when there is no time for another one."""
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
    """Run `operation` until it returns, raises something outside `on`, or the deadline passes.

    Only for operations that are harmless to repeat. The last error is raised as it is.
    """
    backoff = Backoff(policy, clock=clock, rng=rng)
    while True:
        try:
            return await operation()
        except on:
            if not await backoff.pause():
                raise
