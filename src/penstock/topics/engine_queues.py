"""What an engine can do with queues: hand jobs out, and hear what became of them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.clock import SteadyClock
from penstock.topics.jobs import AckResult, ClaimResult, ExtendResult, NackResult
from penstock.topics.queues.api import Queues, WorkStream, check_node
from penstock.topics.routers.routing import Routing

__all__ = ["QueueCalls"]


class QueueCalls:
    """The part of `Engine` that is about queues."""

    _clock: SteadyClock
    _queues: Queues
    _routing: Routing

    def _check_ready(self) -> None:
        raise NotImplementedError

    async def claim(self, name: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> ClaimResult:
        """Take up to `max` jobs of a queue for a while; nobody else gets them until the lease is over.

        Jobs that came back go first, the others in order. One that was delivered as often as the queue allows
        goes to its dead letters instead. Raises `TopicNotFound`, `NotAQueue` and `InvalidRequest`.
        """
        self._check_ready()
        topic = await self._queues.find(name)
        if self._routing.is_fed(name):
            await self._routing.drain(name)
        return await self._queues.claim(topic, node, max, lease_ms)

    async def ack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = ()
    ) -> AckResult:
        """Delete jobs that are done, those that `node` holds; durable as the topic's class says.

        With `lease_ids` only those that are held under that very lease; an empty text fences nothing.
        """
        self._check_ready()
        return await self._queues.ack(name, node, seqs, lease_ids)

    async def nack(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = (), *, delay_ms: int = 0
    ) -> NackResult:
        """Give jobs back, to be claimed again at once or after `delay_ms`; fenced as by `ack`."""
        self._check_ready()
        return await self._queues.nack(name, node, seqs, lease_ids, delay_ms)

    async def extend(
        self, name: str, node: str, seqs: Sequence[int], lease_ids: Sequence[str] = (), *, lease_ms: int
    ) -> ExtendResult:
        """Let leases end `lease_ms` from now; fenced as by `ack`."""
        self._check_ready()
        return await self._queues.extend(name, node, seqs, lease_ids, lease_ms)

    async def work(self, name: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> WorkStream:
        """Jobs as they come, never more than `max` at a time; close it to give them back."""
        self._check_ready()
        check_node(node)
        topic = await self._queues.find(name)
        return WorkStream(
            self._queues,
            topic,
            lambda: self._routing.refresh(name),
            self._clock,
            node=node,
            max=max,
            lease_ms=lease_ms,
        )
