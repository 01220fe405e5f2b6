"""From a request to a handler: key, route, scope, name, caps, and every error as a response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from penstock.http import Fault, Match, Request, Response, Router
from penstock.servers.auth import Keyring, Principal, Scope
from penstock.servers.caps import InFlight
from penstock.servers.errors import MethodNotAllowed, UnknownPath, error_response, response_to

__all__ = ["App", "Call", "Deliver", "Handler", "Prompt", "Route", "authorization"]


class Call:
    """One admitted request: who sent it, and the name in its path."""

    __slots__ = ("body", "name", "principal", "request")

    def __init__(self, request: Request, principal: Principal, name: str) -> None:
        self.request = request
        self.principal = principal
        self.name = name
        self.body: object = None
        """The body as a prompt read it, so that the handler need not read it again."""


Handler: TypeAlias = Callable[[Call], Awaitable[Response]]
Deliver: TypeAlias = Callable[[Response], None]
Prompt: TypeAlias = Callable[[Call, Deliver], bool]
"""Answers without a coroutine. False leaves the call to the handler; else it delivers once, now or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A handler and what it takes to reach it."""

    handler: Handler
    prompt: Prompt | None = None
    """Tried before the handler, where requests are many and small."""
    scope: Scope = Scope.NONE
    is_operation: bool = False
    """For operators: answered before the engine is ready, and never counted as under way."""
    is_probe: bool = False
    """Answered without a key, unless probes need one."""
    takes_token: bool = False
    """The key may stand in the query, for clients that cannot send headers."""
    asks_key: bool = False
    """The handler asks for the key by itself, after it has looked at the rest."""
    is_stream: bool = False
    """Stays open: has caps of its own and is never counted as under way."""
    scope_bits: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope_bits", self.scope.value)


_FAULTS: Final = {
    Fault.MALFORMED: "invalid_request",
    Fault.TOO_LARGE: "payload_too_large",
    Fault.OVERLOADED: "throttled",
    Fault.FORBIDDEN: "forbidden",
}
_NOBODY: Final = Principal(scopes=Scope.NONE)


class App:
    """An `Application` of routes behind keys.

    Order of checks: key (401), path (404), method (405), scope and name (403), readiness (503), requests
    under way (429), then the handler's own. `check_ready` raises while requests cannot be served.
    """

    def __init__(
        self,
        router: Router[Route],
        keys: Keyring,
        *,
        check_ready: Callable[[], None],
        in_flight: InFlight,
        probes_need_key: bool = False,
    ) -> None:
        self._router = router
        self._keys = keys
        self._check_ready = check_ready
        self._in_flight = in_flight
        self._probes_need_key = probes_need_key

    def begin(self, request: Request, deliver: Deliver) -> Coroutine[object, None, Response] | None:
        """Answer, whatever happens; see `Application.begin`."""
        try:
            route, call = self._admit(request)
            if route.prompt is not None and self._is_taken(route.prompt, call, deliver):
                return None
        except Exception as error:  # noqa: BLE001 - a bug must not take the connection with it
            deliver(response_to(error))
            return None
        return self._answer(route, call)

    def _is_taken(self, prompt: Prompt, call: Call, deliver: Deliver) -> bool:
        gate, principal = self._in_flight, call.principal

        def done(response: Response) -> None:
            gate.leave(principal)
            deliver(response)

        gate.enter(principal)
        taken = False
        try:
            taken = prompt(call, done)
        finally:
            if not taken:
                gate.leave(principal)
        return taken

    async def _answer(self, route: Route, call: Call) -> Response:
        try:
            if route.is_operation or route.is_stream:
                return await route.handler(call)
            self._in_flight.enter(call.principal)
            try:
                return await route.handler(call)
            finally:
                self._in_flight.leave(call.principal)
        except Exception as error:  # noqa: BLE001 - a bug must not take the connection with it
            return response_to(error)

    def screen(self, request: Request) -> Response | None:
        """The same checks by the head alone."""
        try:
            self._admit(request)
        except Exception as error:  # noqa: BLE001
            return response_to(error)
        return None

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        return error_response(_FAULTS[fault], message)

    def _admit(self, request: Request) -> tuple[Route, Call]:
        match = self._router.match(request.path)
        route = match.methods.get(request.method) if match is not None else None
        if route is not None and route.is_probe and not self._probes_need_key:
            return route, Call(request, _NOBODY, "")
        if route is not None and match is not None and route.asks_key:
            self._check_ready()
            return route, Call(request, _NOBODY, match.name)
        if route is not None and route.takes_token:
            principal = self._keys.principal(authorization(request))
        else:
            principal = self._keys.principal(request.headers.get(b"authorization"))
        if match is None or route is None:
            raise _missed(request, match)
        if route.scope_bits & ~principal.bits:
            principal.require(route.scope)
        name = match.name
        if name:
            principal.require_name(name)
        if not route.is_operation:
            self._check_ready()
        return route, Call(request, principal, name)


def authorization(request: Request) -> bytes | None:
    """The `Authorization` header, or one made of `?token=` where there is none."""
    header = request.headers.get(b"authorization")
    if header is None and (token := request.query().get("token")):
        return b"Bearer " + token.encode()
    return header


def _missed(request: Request, match: Match[Route] | None) -> Exception:
    if match is not None:
        method = request.method.decode("ascii", "replace")
        allowed = match.allowed
        return MethodNotAllowed(
            f"{method} is not allowed here; use {allowed.decode()}", headers=[(b"allow", allowed)]
        )
    if request.method == b"OPTIONS":
        return MethodNotAllowed("OPTIONS is not supported", headers=[(b"allow", b"GET, PUT, POST, DELETE")])
    return UnknownPath("nothing is at this path")
