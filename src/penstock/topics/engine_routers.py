"""What an engine can do with routers: set them up, look at them, take them down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.topics.limits import PAGE_SIZE_DEFAULT
from penstock.topics.routers.model import RouterConfig, RouterPut, RouterRemoved, RouterState
from penstock.topics.routers.registry import RouterRegistry
from penstock.topics.routers.routing import Routing

__all__ = ["RouterCalls"]


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
        """Begin to bring in what routers feed into the topic; whoever watches it is told when it is there.

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
