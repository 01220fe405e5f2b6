"""The calls for routers: put, get, list and delete."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator
from typing import Final
from urllib.parse import quote

import httpx
import msgspec

from penstock.topics.client.connection import Call, Connection, Repeat
from penstock.topics.client.models import match_tuple, read_answer
from penstock.topics.limits import PAGE_SIZE_MAX
from penstock.topics.model import parse_match
from penstock.topics.names import check_router_name
from penstock.topics.routers.model import Guarantee, RouterConfig, RouterPut, RouterRemoved, RouterState

_PATH: Final = "/v0/routers"


class RouterSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One router in a list."""

    router: str
    source: str
    dest: str
    guarantee: Guarantee
    forwarded_total: int


class _Put(msgspec.Struct):
    source: str
    dest: str
    preserve_node: bool
    preserve_tag: bool
    create_dest: bool
    filter: tuple[str, str, str] | None
    allow_cycle: bool
    guarantee: Guarantee


class _Shown(msgspec.Struct):
    router: str
    source: str
    dest: str
    preserve_node: bool
    preserve_tag: bool
    filter: tuple[str, str, str] | None
    allow_cycle: bool
    guarantee: Guarantee
    created: bool = False
    forwarded_total: int = 0

    @property
    def config(self) -> RouterConfig:
        return RouterConfig(
            source=self.source,
            dest=self.dest,
            preserve_node=self.preserve_node,
            preserve_tag=self.preserve_tag,
            filter=None if self.filter is None else parse_match(self.filter),
            allow_cycle=self.allow_cycle,
            guarantee=self.guarantee,
        )


class _Listing(msgspec.Struct):
    routers: list[RouterSummary]
    next_cursor: str | None = None


class _Removed(msgspec.Struct):
    router: str
    deleted: bool


_ENCODER: Final = msgspec.json.Encoder()
_SHOWN: Final = msgspec.json.Decoder(_Shown)
_LISTING: Final = msgspec.json.Decoder(_Listing)
_REMOVED: Final = msgspec.json.Decoder(_Removed)


class RouterCalls(abc.ABC):
    """The calls of a client for routers."""

    _connection: Connection

    async def put_router(self, router: str, config: RouterConfig) -> RouterPut:
        """Copy records appended to `config.source` from now on into `config.dest`, or change a router.

        An existing router keeps its position. Raises `IncompatibleTopic`, `RouterCycle`, or `TopicNotFound`
        for a destination that may not be created.
        """
        body = _ENCODER.encode(
            _Put(
                source=config.source,
                dest=config.dest,
                preserve_node=config.preserve_node,
                preserve_tag=config.preserve_tag,
                create_dest=config.create_dest,
                filter=match_tuple(config.filter),
                allow_cycle=config.allow_cycle,
                guarantee=config.guarantee,
            )
        )
        answer = await self._send_call("PUT", router, Repeat.UNAPPLIED, body)
        decoded = read_answer("a put of a router", _SHOWN, answer.content)
        return RouterPut(router=decoded.router, created=decoded.created, config=decoded.config)

    async def router(self, router: str) -> RouterState:
        """Return the router's state after it has copied all current records. Raise `RouterNotFound`."""
        answer = await self._send_call("GET", router, Repeat.ALWAYS)
        decoded = read_answer("a router state request", _SHOWN, answer.content)
        return RouterState(
            router=decoded.router, config=decoded.config, forwarded_total=decoded.forwarded_total
        )

    async def routers(
        self,
        prefix: str = "",
        *,
        source: str | None = None,
        dest: str | None = None,
        page_size: int = PAGE_SIZE_MAX,
    ) -> AsyncGenerator[RouterSummary, None]:
        """Yield every router that the key may see, in order of names.

        `source` and `dest` select routers of one source or destination.
        """
        ends = {name: topic for name, topic in (("source", source), ("dest", dest)) if topic is not None}
        query = {"prefix": prefix, "page_size": str(page_size)} | ends
        cursor: str | None = ""
        while cursor is not None:
            more = {"cursor": cursor} if cursor else {}
            call = Call(method="GET", path=_PATH, repeat=Repeat.ALWAYS, query=query | more)
            answer = await self._connection.send(call)
            listing = read_answer("a router list request", _LISTING, answer.content)
            for summary in listing.routers:
                yield summary
            cursor = listing.next_cursor

    async def remove_router(self, router: str) -> RouterRemoved:
        """Remove a router. Records that it has copied stay."""
        answer = await self._send_call("DELETE", router, Repeat.UNAPPLIED)
        decoded = read_answer("a removal of a router", _REMOVED, answer.content)
        return RouterRemoved(router=decoded.router, deleted=decoded.deleted)

    async def _send_call(
        self, method: str, router: str, repeat: Repeat, body: bytes | None = None
    ) -> httpx.Response:
        path = f"{_PATH}/{quote(check_router_name(router), safe='')}"
        return await self._connection.send(Call(method=method, path=path, repeat=repeat, body=body))
