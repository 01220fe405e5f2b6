"""The creation, listing and removal of routers, with their validation and durability."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.clock import Clock
from penstock.topics.config import EngineConfig, TopicConfig
from penstock.topics.errors import InvalidRequest, RouterNotFound, ShuttingDown, Throttled, TopicNotFound
from penstock.topics.log.control import with_length
from penstock.topics.log.frame import FrameType, encode_control
from penstock.topics.log.wal import WalShard
from penstock.topics.names import check_router_name, check_topic_name
from penstock.topics.routers.model import (
    RouterConfig,
    RouterEntry,
    RouterPut,
    RouterRemoved,
    RouterState,
    encode_created,
)
from penstock.topics.routers.routing import Routing
from penstock.topics.routers.table import Router
from penstock.topics.topic.catalog import Catalog
from penstock.topics.topic.changes import PendingCommit
from penstock.topics.topic.topic import Topic


class RouterRegistry:
    """The routers of one engine, by name. Used only on the event loop's thread."""

    def __init__(self, config: EngineConfig, catalog: Catalog, clock: Clock, routing: Routing) -> None:
        self._config = config
        self._catalog = catalog
        self._clock = clock
        self._routing = routing
        self._table = routing.table
        self._shard: WalShard | None = None
        self._changing = asyncio.Lock()

    def open(self, shard: WalShard) -> None:
        """Write the creation and removal of routers to this log."""
        self._shard = shard

    async def put(self, name: str, config: RouterConfig) -> RouterPut:
        """Create or change a router. See `Engine.put_router`."""
        check_router_name(name)
        if config.source == config.dest:
            raise InvalidRequest("source and dest are the same topic; a router joins two")
        check_topic_name(config.source)
        check_topic_name(config.dest)
        # The change continues even if the caller is cancelled. The next call finds it decided.
        return await asyncio.shield(asyncio.ensure_future(self._put(name, config)))

    async def _put(self, name: str, config: RouterConfig) -> RouterPut:
        async with self._changing:
            await self._check(name, config)
            source, dest = await self._topic(config.source), await self._topic(config.dest)
            self._check_open()
            known = self._table.find(name)
            if known is not None and known.config == config:
                return RouterPut(router=name, created=False, config=config)
            await self._record(name, config, source, dest, known)
            return RouterPut(router=name, created=known is None, config=config)

    async def _check(self, name: str, config: RouterConfig) -> None:
        """Check a router in the order of the contract, before anything is created."""
        source, dest = await self._catalog.settled(config.source), await self._catalog.settled(config.dest)
        if dest is None and not config.create_dest:
            raise TopicNotFound(config.dest)
        self._table.check(name, config)
        cap = self._config.max_routers
        if cap and self._table.find(name) is None and len(self._table) >= cap:
            raise Throttled(
                f"there are {len(self._table)} routers; delete some or raise the limit",
                {"limit": "max_routers", "max": cap},
            )
        self._table.check_cycle(name, config)
        self._catalog.check_count((source is None) + (dest is None))

    async def _topic(self, name: str) -> Topic:
        topic = await self._catalog.settled(name)
        return await self._catalog.create(name, TopicConfig().resolved(name)) if topic is None else topic

    def _record(
        self, name: str, config: RouterConfig, source: Topic, dest: Topic, known: Router | None
    ) -> asyncio.Future[None]:
        """Make a router, or the change of one, durable and then apply it."""
        fresh = RouterEntry(
            id=self._catalog.take_id() if known is None else known.id,
            name=name,
            source=source.name,
            source_id=source.id,
            dest=dest.name,
            dest_id=dest.id,
            bits=config.bits,
            match=None if config.filter is None else (config.filter.value, config.filter.is_prefix),
            cursor=source.log.index.head_seq if known is None else known.cursor,
            forwarded_total=0 if known is None else known.forwarded_total,
            dest_base=dest.log.index.head_seq if known is None else known.dest_base,
        )

        def apply() -> None:
            if source.deleted or dest.deleted or (known is not None and known.stopped):
                # A topic was deleted meanwhile, and the router with it, if there was one.
                raise TopicNotFound(source.name if source.deleted else dest.name)
            if known is not None:
                known.config = config
            else:
                self._routing.enter(Router(fresh, source, dest))

        return self._change(FrameType.ROUTER_CREATE, fresh.id, encode_created(fresh), apply)

    async def remove(self, name: str) -> RouterRemoved:
        """Remove a router. See `Engine.remove_router`."""
        return await asyncio.shield(asyncio.ensure_future(self._remove(name)))

    async def _remove(self, name: str) -> RouterRemoved:
        async with self._changing:
            router = self._table.find(name)
            if router is None:
                return RouterRemoved(router=name, deleted=False)
            await self._routing.catch_up(router)
            if self._table.find(name) is not router:
                return RouterRemoved(router=name, deleted=False)
            body = with_length(name.encode())
            await self._change(FrameType.ROUTER_DELETE, router.id, body, lambda: self._routing.leave(router))
            return RouterRemoved(router=name, deleted=True)

    def _change(
        self, kind: FrameType, router_id: int, body: bytes, apply: Callable[[], None]
    ) -> asyncio.Future[None]:
        assert self._shard is not None
        self._shard.check_room()
        change = PendingCommit(lambda entry, position: apply())
        frame = encode_control(kind, 0, body, seq=router_id, ts_ms=self._clock.now_ms())
        self._shard.submit([frame], frames=1, sync=True, waiting=change, urgent=True)
        return change.outcome

    async def state(self, name: str) -> RouterState:
        """Return the state of a router. See `Engine.router`."""
        router = self._find(name)
        await self._routing.drain(router.dest.name)
        return self._find(name).state()

    def _find(self, name: str) -> Router:
        router = self._table.find(name)
        if router is None:
            raise RouterNotFound(name)
        return router

    def peek(self, name: str) -> RouterState:
        """Return the current state of a router without waiting for it. Raise `RouterNotFound`."""
        return self._find(name).state()

    def page(
        self,
        *,
        prefix: str,
        after: str,
        limit: int,
        source: str | None,
        dest: str | None,
        allowed: Callable[[RouterState], bool] | None,
    ) -> tuple[Sequence[RouterState], str | None]:
        """Return a page of routers. See `Engine.routers`."""
        return self._table.page(
            prefix=prefix, after=after, limit=limit, source=source, dest=dest, allowed=allowed
        )

    def _check_open(self) -> None:
        if self._routing.is_closed:
            raise ShuttingDown("the event log is closing; retry when it is back")
