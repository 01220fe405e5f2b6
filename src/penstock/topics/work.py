"""A worker that is told of its jobs as they come, and loses them when it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from penstock.clock import SteadyClock
from penstock.topics.errors import TopicNotFound
from penstock.topics.holding import Holding
from penstock.topics.jobs import ClaimResult
from penstock.topics.limits import CLAIM_MAX
from penstock.topics.queueing import Queues, clamp_lease_ms
from penstock.topics.topic import Topic

__all__ = ["WorkStream"]

_LOOK_EVERY_S: Final = 0.25
"""Leases end and delays pass without anybody being told."""


class WorkStream:
    """The jobs of one connection: at most `max` at a time, refilled as they are acked or nacked.

    Once a lease of it runs out there are no more, until its node acks, nacks or extends, in time or not, one
    of the jobs that were delivered here: a client that hangs costs the queue one delivery of `max` jobs.
    """

    def __init__(
        self,
        queues: Queues,
        topic: Topic,
        refresh: Callable[[], None],
        clock: SteadyClock,
        *,
        node: str,
        max: int,
        lease_ms: int | None,
    ) -> None:
        self._queues = queues
        self._topic = topic
        self._refresh = refresh
        self._clock = clock
        self._node = node
        self._most = min(max or 1, CLAIM_MAX)
        self._lease_ms = lease_ms
        self._held = Holding(node)

    @property
    def held(self) -> int:
        """How many jobs the connection holds."""
        return len(self._held)

    @property
    def is_silent(self) -> bool:
        """Whether all its leases ran out, and it was not heard of for the time of another one."""
        lease_ms = self._topic.config.lease_ms if self._lease_ms is None else self._lease_ms
        return self._held.is_silent(self._clock.steady_ms(), clamp_lease_ms(lease_ms))

    async def next(self, wait_s: float) -> ClaimResult | None:
        """More jobs, as soon as there are any and fewer than `max` are held.

        None when the time is over, or the worker is silent.

        Raises `TopicNotFound` when the queue is gone, and what a claim raises.
        """
        deadline_s = self._clock.monotonic() + wait_s
        desk = self._queues.desk(self._topic)
        while True:
            with self._topic.waiters.register() as published, desk.returned.register() as returned:
                jobs = await self._claim()
                if jobs is not None:
                    return jobs
                left_s = deadline_s - self._clock.monotonic()
                if left_s <= 0 or self.is_silent:
                    return None
                await self._wait({published, returned}, min(left_s, _LOOK_EVERY_S))

    async def _claim(self) -> ClaimResult | None:
        self._queues.check()
        if self._topic.gone:
            raise TopicNotFound(self._topic.name)
        self._refresh()
        self._queues.look(self._topic)
        free = self._most - len(self._held)
        if free <= 0 or not self._held.takes_jobs:
            return None
        jobs = await self._queues.claim(self._topic, self._node, free, self._lease_ms, self._held)
        return jobs if jobs.seqs else None

    async def _wait(self, wakers: set[asyncio.Future[None]], at_most_s: float) -> None:
        timer = asyncio.ensure_future(self._clock.sleep(at_most_s))
        try:
            await asyncio.wait([*wakers, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Everything that was delivered here and is still held is ready for others at once."""
        if not self._topic.gone:
            await self._queues.drop(self._topic, self._held)
