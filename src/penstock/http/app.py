"""The application of every HTTP port: it routes each request to its handler.

An `App` has routes, a policy (which requests it admits) and one function that turns errors into
responses. It checks a request in this order:

1. the policy's guard (`Host`), then its pages,
2. the key (401), before the response reveals whether a path exists, unless the policy disables this,
3. path (404) and method (405),
4. scope and name (403),
5. readiness (503), then the route's own check of the head,
6. the limit on requests in progress, then the handler.

No error reaches the transport: every exception, including a bug, becomes a response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypeVar

from penstock.http.auth import Principal, Scope, no_key
from penstock.http.errors import MethodNotAllowed, PayloadTooLarge, TransportFault, UnknownPath
from penstock.http.message import Application, Fault, HeaderList, Request, Response
from penstock.http.router import Match, Router


class Call:
    """One admitted request with its sender and the name in its path."""

    __slots__ = ("name", "principal", "request")

    def __init__(self, request: Request, principal: Principal, name: str) -> None:
        self.request = request
        self.principal = principal
        self.name = name


C = TypeVar("C", bound=Call)

Deliver: TypeAlias = Callable[[Response], None]
Authenticate: TypeAlias = Callable[[Request], Principal]
Errors: TypeAlias = Callable[[Exception, Request | None], Response]
"""Turns an error into a response, and never raises. The request is None if it is unknown."""
Handler: TypeAlias = Callable[[C], Awaitable[Response]]
CallbackHandler: TypeAlias = Callable[[C, Deliver], None]
"""A handler without a coroutine. It delivers one response, immediately or later, or raises."""


class Cap(Protocol):
    """Counts requests in progress."""

    def enter(self, principal: Principal) -> None:
        """Count one more request. May raise an error to refuse it."""
        ...

    def leave(self, principal: Principal) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Generic[C]):
    """A handler and its admission rules."""

    handler: Handler[C] | None = None
    callback: CallbackHandler[C] | None = None
    """Use instead of `handler` for many small requests. Not allowed with a policy that needs a task."""
    scope: Scope
    cap: Cap | None = None
    auth: Authenticate | None = None
    """Identifies the sender; None uses the policy's function. `no_key` admits any client."""
    ready: bool = True
    """Whether the route requires a ready application."""
    check: Callable[[Request], None] | None = None
    """Raises an error to refuse a request by its head."""

    def __post_init__(self) -> None:
        assert (self.handler is None) is not (self.callback is None), "a route has one handler"


Routes: TypeAlias = Iterable[tuple[bytes, bytes, Route[C]]]
"""Method, path, route."""


def missed(request: Request, allowed: bytes | None) -> Exception:
    """Return the error for a request without a route: an unknown path (`allowed` is None) or method."""
    if allowed is None:
        return UnknownPath("nothing is at this path")
    return MethodNotAllowed(f"use {allowed.decode()} for this path", headers=[(b"allow", allowed)])


def body_limit(bytes_max: Callable[[], int]) -> Callable[[Request], None]:
    """Return a check for a route whose body limit is lower than the server's."""

    def check(request: Request) -> None:
        """Raise `PayloadTooLarge` if the body, or the length declared in the head, exceeds the limit."""
        most = bytes_max()
        declared = request.headers.get(b"content-length", b"")
        size = max(len(request.body), int(declared) if declared.isdigit() else 0)
        if size > most:
            raise PayloadTooLarge(f"the body has {size:,} bytes; here it may have at most {most:,} bytes")

    return check


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Generic[C]):
    """The admission rules of an application, and how its handlers run."""

    call: Callable[[Request, Principal, str], C]
    """Creates the argument of the handlers from an admitted request."""
    authenticate: Authenticate = no_key
    check_ready: Callable[[], None] | None = None
    """Raises an error while requests cannot be served."""
    missed: Callable[[Request, bytes | None], Exception] = missed
    hides_paths: bool = True
    """Whether only a sender with a key can learn which paths exist."""
    guard: Callable[[Request], None] | None = None
    """Raises an error to refuse a request before any other check."""
    page: Callable[[Request], Response | None] | None = None
    """Returns a page for some requests, before the routes."""
    fallback: Application | None = None
    """Serves faults, and requests for paths without a route."""
    own_task: bool = False
    """Whether each handler runs in its own task, cancelled when the client leaves."""
    timeout_s: float | None = None
    """Timeout of a handler in a task, until it returns its response."""
    headers: HeaderList = ()
    """Headers added to every response of the application itself."""


class _Admission(Generic[C]):
    """A route with its admission rules resolved in advance."""

    __slots__ = (
        "authenticate",
        "callback",
        "cap",
        "check",
        "check_ready",
        "handler",
        "scope",
        "scope_bits",
    )

    def __init__(self, route: Route[C], policy: Policy[C]) -> None:
        self.handler = route.handler
        self.callback = route.callback
        if policy.own_task or policy.headers:
            assert route.handler is not None, "this policy wraps handlers; a callback cannot be wrapped"
            self.handler = _wrapped(route.handler, policy)
        self.cap = route.cap
        self.authenticate = policy.authenticate if route.auth is None else route.auth
        self.check_ready = policy.check_ready if route.ready else None
        self.check = route.check
        self.scope = route.scope
        self.scope_bits = route.scope.value
        """The scopes as a number: comparing flags is slow, and every request compares them."""


class App(Generic[C]):
    """An `Application` with routes."""

    def __init__(self, routes: Routes[C], policy: Policy[C], errors: Errors) -> None:
        self._router: Router[_Admission[C]] = Router()
        for method, path, route in routes:
            self._router.add(method, path, _Admission(route, policy))
        self._match = self._router.match
        self._policy = policy
        self._call = policy.call
        self._is_guarded = policy.guard is not None or policy.page is not None
        self._fallback = policy.fallback
        self._errors = errors

    def begin(self, request: Request, deliver: Deliver) -> Coroutine[object, None, Response] | None:
        """Respond in any case; see `Application.begin`."""
        try:
            match = self._match(request.path)
            if match is None and self._fallback is not None:
                return self._fallback.begin(request, deliver)
            if self._is_guarded:
                page = self._guarded(request)
                if page is not None:
                    deliver(page)
                    return None
            route, call = self._admit(request, match)
            if route.handler is not None:
                return self._answer(route.handler, route.cap, call)
            assert route.callback is not None
            _call_back(route.callback, route.cap, call, deliver)
        except Exception as error:  # noqa: BLE001 - a bug must not break the connection
            deliver(self._error_response(error, request))
        return None

    def _guarded(self, request: Request) -> Response | None:
        """Return the policy's page for the request, if any. Raise if the guard refuses it."""
        policy = self._policy
        if policy.guard is not None:
            policy.guard(request)
        page = None if policy.page is None else policy.page(request)
        return None if page is None else _with_headers(page, policy.headers)

    async def _answer(self, handler: Handler[C], cap: Cap | None, call: C) -> Response:
        try:
            if cap is None:
                return await handler(call)
            cap.enter(call.principal)
            try:
                return await handler(call)
            finally:
                cap.leave(call.principal)
        except Exception as error:  # noqa: BLE001 - a bug must not break the connection
            return self._error_response(error, call.request)

    def screen(self, request: Request) -> Response | None:
        """Run the same checks on the head alone."""
        try:
            match = self._match(request.path)
            if match is None and self._fallback is not None:
                return self._fallback.screen(request)
            if self._policy.guard is not None:
                self._policy.guard(request)
            self._admit(request, match)
        except Exception as error:  # noqa: BLE001
            return self._error_response(error, request)
        return None

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        """See `Application.fault`."""
        if self._fallback is not None:
            return self._fallback.fault(fault, message, head)
        return self._error_response(TransportFault(fault, message), head)

    def _error_response(self, error: Exception, request: Request | None) -> Response:
        return _with_headers(self._errors(error, request), self._policy.headers)

    def _admit(self, request: Request, match: Match[_Admission[C]] | None) -> tuple[_Admission[C], C]:
        route = match.methods.get(request.method) if match is not None else None
        if match is None or route is None:
            if self._policy.hides_paths:
                self._policy.authenticate(request)
            raise self._policy.missed(request, None if match is None else match.allowed)
        principal = route.authenticate(request)
        if route.scope_bits & ~principal.bits:
            principal.require(route.scope)
        name = match.name
        if name and principal.prefixes:
            principal.require_name(name)
        if route.check_ready is not None:
            route.check_ready()
        if route.check is not None:
            route.check(request)
        return route, self._call(request, principal, name)


def _call_back(callback: CallbackHandler[C], cap: Cap | None, call: C, deliver: Deliver) -> None:
    """Run a callback handler; count the request until it delivers its response."""
    if cap is None:
        callback(call, deliver)
        return
    counter, principal = cap, call.principal

    def done(response: Response) -> None:
        counter.leave(principal)
        deliver(response)

    counter.enter(principal)
    try:
        callback(call, done)
    except BaseException:
        counter.leave(principal)
        raise


def _wrapped(handler: Handler[C], policy: Policy[C]) -> Handler[C]:
    timeout_s, headers, own_task = policy.timeout_s, policy.headers, policy.own_task

    async def run(call: C) -> Response:
        if own_task:
            await asyncio.sleep(0)  # runs as a task from here on, cancelled when the client leaves
        if timeout_s is None:
            return _with_headers(await handler(call), headers)
        async with asyncio.timeout(timeout_s):
            return _with_headers(await handler(call), headers)

    return run


def _with_headers(response: Response, headers: HeaderList) -> Response:
    if headers:
        response.headers = [*response.headers, *headers]
    return response
