"""The handlers of routers."""

from __future__ import annotations

import contextlib
from typing import Final, Literal

import msgspec

from penstock.http import Call, Cap, Principal, Request, Response, Route, Routes, Scope
from penstock.servers.topics.answers import elapsed_ms, read_cursor, write_cursor
from penstock.servers.topics.bodies import query_number, read_json
from penstock.topics import (
    PAGE_SIZE_DEFAULT,
    PAGE_SIZE_MAX,
    Engine,
    IncompatibleTopic,
    RouterConfig,
    RouterCycle,
    RouterNotFound,
    RouterState,
    TopicName,
    canonical,
    check_router_name,
    names_in,
    parse_match,
)

_ROUTER: Final = b"/v0/routers/{name}"
_ENCODE: Final = msgspec.json.Encoder().encode
_CYCLE: Final = (
    "records would form a cycle through topics that this key does not cover; set allow_cycle to permit it"
)
_FAN_IN: Final = (
    "the destination already has its records from a topic that this key does not cover; "
    "a destination has one source"
)


class _PutBody(msgspec.Struct):
    source: TopicName
    dest: TopicName
    preserve_node: bool = True
    preserve_tag: bool = True
    create_dest: bool = True
    filter: object = None
    allow_cycle: bool = False
    guarantee: Literal["at_least_once", "exactly_once"] = "at_least_once"

    def config(self) -> RouterConfig:
        return RouterConfig(
            source=self.source,
            dest=self.dest,
            preserve_node=self.preserve_node,
            preserve_tag=self.preserve_tag,
            create_dest=self.create_dest,
            filter=None if self.filter is None else parse_match(self.filter),
            allow_cycle=self.allow_cycle,
            guarantee=self.guarantee,
        )


_PUT: Final = msgspec.json.Decoder(_PutBody)


class RouterApi:
    """The handlers of routers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def routes(self, cap: Cap) -> Routes[Call]:
        yield b"PUT", _ROUTER, Route(handler=self.put, scope=Scope.ADMIN, cap=cap)
        yield b"GET", _ROUTER, Route(handler=self.get, scope=Scope.READ, cap=cap)
        yield b"GET", b"/v0/routers", Route(handler=self.list, scope=Scope.READ, cap=cap)
        yield b"DELETE", _ROUTER, Route(handler=self.remove, scope=Scope.DELETE, cap=cap)

    async def put(self, call: Call) -> Response:
        body = read_json(_PUT, call.request)
        config = body.config()
        check_router_name(call.name)
        call.principal.require_names(names_in(body))
        with contextlib.suppress(RouterNotFound):  # a refusal would reveal its topics
            _require_ends(call.principal, (await self._engine.router(call.name, drain=False)).config)
        try:
            result = await self._engine.put_router(call.name, config)
        except (RouterCycle, IncompatibleTopic) as error:
            raise self._redacted(call.principal, config, error) from None
        shown = {"router": result.router, "created": result.created, **_shown(result.config)}
        return _answer(call.request, shown, 201 if result.created else 200)

    def _redacted(
        self, principal: Principal, config: RouterConfig, error: RouterCycle | IncompatibleTopic
    ) -> RouterCycle | IncompatibleTopic:
        """Return the error without the names of topics that the key does not cover."""
        detail = error.detail or {}
        instead: RouterCycle | IncompatibleTopic
        if isinstance(error, RouterCycle):
            names = detail["cycle"]
            instead = RouterCycle(_CYCLE)
        elif detail.get("reason") == "router_dest_fan_in":
            names = [state.config.source for state in self._engine.routers(dest=config.dest)[0]]
            instead = IncompatibleTopic(_FAN_IN, detail)
        else:
            return error
        assert isinstance(names, list)
        return error if all(map(principal.may_name, names)) else instead

    async def get(self, call: Call) -> Response:
        _require_ends(call.principal, (await self._engine.router(call.name, drain=False)).config)
        state = await self._engine.router(call.name)
        body = {
            "router": state.router,
            **_shown(state.config),
            "forwarded_total": state.forwarded_total,
        }
        return _answer(call.request, body)

    async def list(self, call: Call) -> Response:
        query, principal = call.request.query(), call.principal
        size = query_number(query, "page_size", PAGE_SIZE_DEFAULT)

        def allowed(state: RouterState) -> bool:
            names = (state.router, state.config.source, state.config.dest)
            return all(principal.may_name(name) for name in names)

        states, after = self._engine.routers(
            prefix=query.get("prefix", ""),
            after=read_cursor(query.get("cursor", "")),
            limit=min(max(size, 1), PAGE_SIZE_MAX),
            source=query.get("source"),
            dest=query.get("dest"),
            allowed=allowed if principal.prefixes else None,
        )
        body: dict[str, object] = {
            "routers": [
                {
                    "router": state.router,
                    "source": state.config.source,
                    "dest": state.config.dest,
                    "guarantee": state.config.guarantee,
                    "forwarded_total": state.forwarded_total,
                }
                for state in states
            ]
        }
        if after is not None:
            body["next_cursor"] = write_cursor(after)
        return _answer(call.request, body)

    async def remove(self, call: Call) -> Response:
        try:
            _require_ends(call.principal, (await self._engine.router(call.name, drain=False)).config)
        except RouterNotFound:
            return _answer(call.request, {"router": call.name, "deleted": False})
        result = await self._engine.remove_router(call.name)
        return _answer(call.request, {"router": result.router, "deleted": result.deleted})


def _require_ends(principal: Principal, config: RouterConfig) -> None:
    """Raise `Forbidden` without the names: the key may not be allowed to learn them."""
    principal.require_name(config.source)
    principal.require_name(config.dest)


def _shown(config: RouterConfig) -> dict[str, object]:
    return {
        "source": config.source,
        "dest": config.dest,
        "preserve_node": config.preserve_node,
        "preserve_tag": config.preserve_tag,
        "filter": None if config.filter is None else canonical(config.filter),
        "allow_cycle": config.allow_cycle,
        "guarantee": config.guarantee,
    }


def _answer(request: Request, body: dict[str, object], status: int = 200) -> Response:
    body["performance"] = {"server_total_ms": round(elapsed_ms(request), 3)}
    return Response(status, _ENCODE(body))
