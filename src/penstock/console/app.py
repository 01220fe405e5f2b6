"""From a request to a handler of the console: host, path, who asks, scope, and every error as JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import httpx
import msgspec

from penstock.console.access import LOOK, Access
from penstock.console.poller import reason_of
from penstock.console.static_files import StaticFiles
from penstock.errors import (
    ConfigError,
    Conflict,
    InvalidInput,
    LimitExceeded,
    NotFound,
    PenstockError,
    Unavailable,
)
from penstock.http import Fault, HeaderList, Request, Response, Router
from penstock.jsontext import check_json
from penstock.servers import STATUS as _STATUS
from penstock.servers import (
    MethodNotAllowed,
    Principal,
    Refusal,
    Scope,
    UnknownPath,
    UnsupportedMediaType,
    told,
)

__all__ = [
    "BODY_BYTES_MAX",
    "Call",
    "ConsoleApp",
    "Handler",
    "Route",
    "json_answer",
    "number_of",
    "read_body",
]

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
BODY_BYTES_MAX: Final = 1 << 20
ANSWER_S: Final = 40.0
"""A part or a store that hangs must not keep a request for ever."""
_ROOT: Final = b"/console"
_STATIC: Final = b"/console/static/"
_API: Final = b"/console/api/"
_HEADERS: Final = (
    (
        b"content-security-policy",
        (
            b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
            b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_NO_STORE: Final = (b"cache-control", b"no-store")
_FAULTS: Final = {
    Fault.MALFORMED: "invalid_request",
    Fault.TOO_LARGE: "payload_too_large",
    Fault.OVERLOADED: "throttled",
    Fault.FORBIDDEN: "forbidden",
}
_ENCODE: Final = msgspec.json.Encoder().encode


class Call:
    """One admitted request: who sent it, and the name in its path."""

    __slots__ = ("name", "principal", "query", "request")

    def __init__(self, request: Request, principal: Principal, name: str) -> None:
        self.request = request
        self.principal = principal
        self.name = name
        self.query = request.query()


Handler: TypeAlias = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A handler and what it takes to reach it."""

    handler: Handler
    scope: Scope = LOOK
    is_open: bool = False
    """Reached without a key or session: the page, and what begins a session."""


def json_answer(value: object, status: int = 200, headers: HeaderList = ()) -> Response:
    return Response(status, _ENCODE(value), headers=[_NO_STORE, *headers])


def number_of(call: Call, name: str, default: int, *, least: int = 0, most: int) -> int:
    """A whole number of the query. Raises `InvalidInput` for anything else; above `most` it is `most`."""
    text = call.query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) >= least):
        raise InvalidInput(f"{name}: expected a whole number of at least {least}, found {text[:40]!r}")
    return min(int(text), most)


def read_body(call: Call, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as JSON. Raises `InvalidInput`, `UnsupportedMediaType`."""
    kind = call.request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise UnsupportedMediaType("send the body as Content-Type: application/json")
    check_json(call.request.body)
    try:
        return decoder.decode(call.request.body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not what it should be: {error}") from None


class ConsoleApp:
    """An `Application`: the page for anybody who gets here, the rest for whoever may."""

    def __init__(
        self, access: Access, static: StaticFiles, routes: Sequence[tuple[bytes, bytes, Route]]
    ) -> None:
        self._access = access
        self._static = static
        self._router: Router[Route] = Router()
        for method, path, route in routes:
            self._router.add(method, _API + path, route)

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        """Answer, whatever happens; see `Application.begin`."""
        try:
            self._access.check_host(request)
            page = self._page(request)
            if page is not None:
                deliver(_secured(page))
                return None
            route, call = self._admit(request)
        except Exception as error:  # noqa: BLE001 - a bug must not take the connection with it
            deliver(_secured(refusal(error)))
            return None
        return self._answer(route, call)

    async def _answer(self, route: Route, call: Call) -> Response:
        try:
            await asyncio.sleep(0)  # a task of its own: given up when the client leaves
            async with asyncio.timeout(ANSWER_S):  # of a stream, until it begins
                return _secured(await route.handler(call))
        except Exception as error:  # noqa: BLE001
            return _secured(refusal(error))

    def screen(self, request: Request) -> Response | None:
        """The same checks by the head alone."""
        try:
            self._access.check_host(request)
            self._admit(request)
        except Exception as error:  # noqa: BLE001
            return _secured(refusal(error))
        return None

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        code = _FAULTS[fault]
        return _secured(error_answer(_STATUS[code], code, message))

    def _page(self, request: Request) -> Response | None:
        """What a browser loads; it holds no secret."""
        path = request.path
        if path.startswith(_API) or request.method not in (b"GET", b"HEAD"):
            return None
        if path == b"/":
            return Response(307, headers=[(b"location", _ROOT)])
        if path in (_ROOT, _ROOT + b"/"):
            name = "index.html"
        elif path.startswith(_STATIC):
            name = path[len(_STATIC) :].decode("ascii", "replace")
        else:
            return None
        return self._static.answer(request, name)

    def _admit(self, request: Request) -> tuple[Route, Call]:
        match = self._router.match(request.path)
        route = match.methods.get(request.method) if match is not None else None
        if route is not None and match is not None and route.is_open:
            return route, Call(request, Principal(scopes=Scope.NONE), match.name)
        if not request.path.startswith(_API):
            raise UnknownPath("nothing is at this path; the console is at /console")
        principal = self._access.principal(request)
        if match is None:
            raise UnknownPath("nothing is at this path")
        if route is None:
            allowed = match.allowed
            raise MethodNotAllowed(f"use {allowed.decode()} for this path", headers=[(b"allow", allowed)])
        principal.require(route.scope)
        return route, Call(request, principal, match.name)


def error_answer(status: int, code: str, message: str, headers: HeaderList = ()) -> Response:
    return json_answer({"error": {"code": code, "message": message}}, status, headers)


def refusal(error: Exception) -> Response:
    """What a client is told about an error; what nobody expected is logged and told as `internal`."""
    if isinstance(error, Refusal):
        return error_answer(_STATUS[error.code], error.code, str(error), error.headers)
    if isinstance(error, NotFound):
        return error_answer(404, "not_found", told(error))
    if isinstance(error, Conflict):
        return error_answer(409, "conflict", told(error))
    if isinstance(error, LimitExceeded):
        return error_answer(429, "throttled", told(error), [(b"retry-after", b"1")])
    if isinstance(error, InvalidInput | ConfigError):
        return error_answer(400, "invalid_request", told(error))
    if isinstance(error, PenstockError | TimeoutError | OSError | httpx.HTTPError):
        headers = [(b"retry-after", b"1")] if isinstance(error, Unavailable) else []
        return error_answer(503, "unavailable", reason_of(error), headers)
    _LOG.error("a request failed", exc_info=error)
    return error_answer(500, "internal", "the console failed; its log says why")


def _secured(response: Response) -> Response:
    response.headers = [*response.headers, *_HEADERS]
    return response
