"""The calls of a worker without an event loop."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.blocking import LoopThread
from penstock.topics.client.queue_calls import JobRef, QueueCalls
from penstock.topics.jobs import AckResult, ClaimResult, ExtendResult, NackResult

__all__ = ["BlockingQueueCalls"]


class BlockingQueueCalls:
    """Blocking twin of `QueueCalls`."""

    _loop: LoopThread
    _inner: QueueCalls

    def claim(self, topic: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> ClaimResult:
        """Take up to `max` jobs for as long as the lease."""
        return self._loop.run(self._inner.claim(topic, node, max=max, lease_ms=lease_ms))

    def ack(self, topic: str, node: str, jobs: Sequence[JobRef]) -> AckResult:
        """These jobs are done: delete them."""
        return self._loop.run(self._inner.ack(topic, node, jobs))

    def nack(self, topic: str, node: str, jobs: Sequence[JobRef], *, delay_ms: int = 0) -> NackResult:
        """Give these jobs back, to be claimed again at once or after `delay_ms`."""
        return self._loop.run(self._inner.nack(topic, node, jobs, delay_ms=delay_ms))

    def extend(self, topic: str, node: str, jobs: Sequence[JobRef], *, lease_ms: int) -> ExtendResult:
        """Keep these jobs until `lease_ms` from now."""
        return self._loop.run(self._inner.extend(topic, node, jobs, lease_ms=lease_ms))
