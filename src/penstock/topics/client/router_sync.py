"""The calls about routers without an event loop."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.blocking import LoopThread
from penstock.topics.client.pull import pull
from penstock.topics.client.router_calls import RouterCalls, RouterSummary
from penstock.topics.limits import PAGE_SIZE_MAX
from penstock.topics.router import RouterConfig, RouterPut, RouterRemoved, RouterState

__all__ = ["BlockingRouterCalls"]


class BlockingRouterCalls:
    """Blocking twin of `RouterCalls`."""

    _loop: LoopThread
    _inner: RouterCalls

    def put_router(self, router: str, config: RouterConfig) -> RouterPut:
        """Copy what is appended to one topic from now on into another one, or change how."""
        return self._loop.run(self._inner.put_router(router, config))

    def router(self, router: str) -> RouterState:
        """The router, after it has copied what there is."""
        return self._loop.run(self._inner.router(router))

    def routers(
        self,
        prefix: str = "",
        *,
        source: str | None = None,
        dest: str | None = None,
        page_size: int = PAGE_SIZE_MAX,
    ) -> Iterator[RouterSummary]:
        """Every router that the key may see, by name: of this source, of this destination."""
        return pull(self._loop, self._inner.routers(prefix, source=source, dest=dest, page_size=page_size))

    def remove_router(self, router: str) -> RouterRemoved:
        """Copy nothing more; what was copied stays."""
        return self._loop.run(self._inner.remove_router(router))
