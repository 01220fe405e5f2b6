"""A work stream without an event loop."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.blocking import LoopThread
from penstock.topics.client.pull import pull
from penstock.topics.client.work_calls import WorkCalls
from penstock.topics.jobs import ClaimedJob

__all__ = ["BlockingWorkCalls"]


class BlockingWorkCalls:
    """Blocking twin of `WorkCalls`."""

    _loop: LoopThread
    _inner: WorkCalls

    def work(
        self, topic: str, node: str, *, max: int = 1, lease_ms: int | None = None
    ) -> Iterator[ClaimedJob]:
        """Jobs of a queue as they come, never more than `max` that are neither acked nor nacked."""
        return pull(self._loop, self._inner.work(topic, node, max=max, lease_ms=lease_ms))
