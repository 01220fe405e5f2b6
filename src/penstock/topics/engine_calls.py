"""The engine's calls about queues and about routers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.clock import SteadyClock
from penstock.topics.limits import PAGE_SIZE_DEFAULT
from penstock.topics.model import AckResult, ClaimResult, ExtendResult, NackResult
from penstock.topics.queues.api import Queues, WorkStream, check_node
from penstock.topics.routers.model import RouterConfig, RouterPut, RouterRemoved, RouterState
from penstock.topics.routers.registry import RouterRegistry
from penstock.topics.routers.routing import Routing


class QueueCalls:
    """The part of `Engine` that is about queues."""

    _clock: SteadyClock
    _queues: Queues
    _routing: Routing

    def _check_ready(self) -> None:
        raise NotImplementedError

    async def claim(self, name: str, node: str, *, max: int = 1, lease_ms: int | None = None) -> ClaimResult:
        """Take up to `max` jobs of a queue for a while; no other worker gets them until the lease ends.

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


class RouterCalls:
    """The part of `Engine` that is about routers."""

    _routing: Routing
    _routers: RouterRegistry

    def _check_ready(self) -> None:
        raise NotImplementedError

    async def put_router(self, name: str, config: RouterConfig) -> RouterPut:
        """Copy what is appended to one topic from now on into another one, or change how.

        Missing topics are created. Raises `InvalidRequest`, `TopicNotFound` for a destination that may not be
        created, `IncompatibleTopic` for one with another source or a router with other topics, `RouterCycle`,
        and `Throttled` when there are too many.
        """
        self._check_ready()
        return await self._routers.put(name, config)

    async def remove_router(self, name: str) -> RouterRemoved:
        """Copy nothing more; what was copied stays. A router that is not there counts as deleted."""
        self._check_ready()
        return await self._routers.remove(name)

    async def router(self, name: str, *, drain: bool = True) -> RouterState:
        """One router, after it has copied what there is. Raises `RouterNotFound`."""
        self._check_ready()
        return await self._routers.state(name) if drain else self._routers.peek(name)

    def routers(
        self,
        *,
        prefix: str = "",
        after: str = "",
        limit: int = PAGE_SIZE_DEFAULT,
        source: str | None = None,
        dest: str | None = None,
        allowed: Callable[[RouterState], bool] | None = None,
    ) -> tuple[Sequence[RouterState], str | None]:
        """Routers by name, at most `limit`, and the `after` of the next page, None at the end."""
        self._check_ready()
        return self._routers.page(
            prefix=prefix, after=after, limit=limit, source=source, dest=dest, allowed=allowed
        )

    @property
    def router_count(self) -> int:
        """How many routers there are."""
        return len(self._routing)

    def refresh(self, name: str) -> None:
        """Begin to copy what routers feed into the topic; its watchers are notified when it arrives.

        Costs nothing where none does.
        """
        self._routing.refresh(name)

    def is_fed(self, name: str) -> bool:
        """Whether a router brings records into the topic."""
        return self._routing.is_fed(name)

    async def drain(self, name: str) -> None:
        """Return when the topic has what its routers have to bring; `state` then counts it."""
        self._check_ready()
        await self._routing.drain(name)
