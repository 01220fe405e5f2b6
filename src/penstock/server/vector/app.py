"""From a request to a handler: key, path, method, scope, readiness; every error in the API's envelope."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.coordinator import FlushError, Shutdown
from penstock.errors import Fenced, NotFound, Rejected, Unavailable
from penstock.http.message import Fault, HeaderList, Request, Response
from penstock.http.routes import Router
from penstock.server.auth import Keyring, Scope
from penstock.server.errors import STATUS, MethodNotAllowed, Refusal, UnknownPath
from penstock.vector.api import error_answer

__all__ = ["JSON", "PROTOBUF_JSON", "Call", "Route", "VectorApp"]

_LOG = logging.getLogger(__name__)

PROTOBUF_JSON: Final = b"application/protobuf+json"
JSON: Final = b"application/json"
_RETRY: Final = (b"retry-after", b"1")
_FAULTS: Final = {Fault.MALFORMED: 400, Fault.TOO_LARGE: 413}


@dataclass(frozen=True, slots=True)
class Call:
    """One admitted request, and the name in its path."""

    request: Request
    name: str

    def answer(self, status: int, body: bytes, headers: HeaderList = ()) -> Response:
        """An answer of the type that the client speaks: plain JSON to whoever sends or asks for that."""
        return Response(status, body, content_type=_spoken(self.request), headers=headers)


Handler: TypeAlias = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A handler and what it takes to reach it."""

    handler: Handler
    scope: Scope = Scope.READ
    at_any_time: bool = False
    """Answered before the collection is open, and however many requests are under way."""
    is_probe: bool = False
    """That, and without a key."""


class VectorApp:
    """An `Application` of routes behind keys."""

    def __init__(
        self, router: Router[Route], keys: Keyring, *, check_ready: Callable[[], None], requests_max: int
    ) -> None:
        self._router = router
        self._keys = keys
        self._check_ready = check_ready
        self._requests_max = requests_max
        self._under_way = 0

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        """Answer, whatever happens; see `Application.begin`."""
        try:
            route, call = self._admit(request)
        except Exception as error:  # noqa: BLE001 - a bug must not take the connection with it
            deliver(_refusal(error, request))
            return None
        return self._answer(route, call)

    async def _answer(self, route: Route, call: Call) -> Response:
        self._under_way += 1
        try:
            await asyncio.sleep(0)  # a task of its own: given up when the client leaves
            return await route.handler(call)
        except Exception as error:  # noqa: BLE001
            return _refusal(error, call.request)
        finally:
            self._under_way -= 1

    def screen(self, request: Request) -> Response | None:
        """The same checks by the head alone."""
        try:
            self._admit(request)
        except Exception as error:  # noqa: BLE001
            return _refusal(error, request)
        return None

    def fault(self, fault: Fault, message: str) -> Response:
        """The answer to what never became a request."""
        return _error(_FAULTS.get(fault, 503), message, PROTOBUF_JSON)

    def _admit(self, request: Request) -> tuple[Route, Call]:
        match = self._router.match(request.path)
        route = match.methods.get(request.method) if match is not None else None
        if route is not None and match is not None and route.is_probe:
            return route, Call(request, match.name)
        principal = self._keys.principal(request.headers.get(b"authorization"))
        if match is None:
            raise UnknownPath("nothing is at this path")
        if route is None:
            allowed = match.allowed
            raise MethodNotAllowed(f"use {allowed.decode()} for this path", headers=[(b"allow", allowed)])
        principal.require(route.scope)
        if not route.at_any_time:
            self._check_ready()
            if self._under_way >= self._requests_max:
                raise Unavailable(f"{self._requests_max} requests are under way, which is the cap")
        return route, Call(request, match.name)


def _spoken(request: Request) -> bytes:
    told = request.headers.get(b"content-type", b"") + b"," + request.headers.get(b"accept", b"")
    return JSON if JSON in told.lower() else PROTOBUF_JSON


def _refusal(error: Exception, request: Request) -> Response:
    spoken = _spoken(request)
    if isinstance(error, Refusal):
        return _error(STATUS[error.code], str(error), spoken, error.headers)
    if isinstance(error, Unavailable | Shutdown | Fenced):
        # Not the sender's fault, and whoever serves next will take it: senders come again on 503.
        return _error(503, str(error), spoken)
    if isinstance(error, NotFound):
        return _error(404, str(error), spoken)
    if isinstance(error, Rejected):
        return _error(400, str(error), spoken)
    _LOG.error("a request failed", exc_info=error)
    message = str(error) if isinstance(error, FlushError) else "the server failed; its log says why"
    return _error(500, message, spoken)


def _error(status: int, message: str, spoken: bytes, headers: HeaderList = ()) -> Response:
    told = [*headers, _RETRY] if status in (429, 503) else headers
    return Response(status, error_answer(message), content_type=spoken, headers=told)
