"""From a request to a handler: key, path, method, scope, readiness; errors in Prometheus' envelope."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import parse_qs

import msgspec

from penstock.coordinator import FlushError, Shutdown
from penstock.errors import InvalidInput, PenstockError, Unavailable
from penstock.http.message import Fault, HeaderList, Request, Response
from penstock.http.routes import Router
from penstock.server.auth import Keyring, Scope
from penstock.server.errors import STATUS, MethodNotAllowed, Refusal, UnknownPath
from penstock.timeseries.api import Answer, Parameters, error_answer

__all__ = ["Call", "Route", "TimeSeriesApp", "response_of"]

_LOG = logging.getLogger(__name__)
_RETRY: Final = (b"retry-after", b"1")
_FORM: Final = b"application/x-www-form-urlencoded"
_FAULTS: Final = {Fault.MALFORMED: (400, "bad_data"), Fault.TOO_LARGE: (413, "bad_data")}


@dataclass(frozen=True, slots=True)
class Call:
    """One admitted request, and the name in its path."""

    request: Request
    name: str

    def parameters(self) -> Parameters:
        """Of the query and, if the body is a form, of that too. Raises `InvalidInput`."""
        parts = [self.request.query_text]
        if self.request.headers.get(b"content-type", b"").partition(b";")[0].strip() == _FORM:
            parts.insert(0, self.request.body)
        try:
            text = b"&".join(part for part in parts if part).decode("ascii")
            return parse_qs(text, keep_blank_values=True, max_num_fields=10_000, errors="strict")
        except ValueError as error:
            raise InvalidInput(f"the parameters cannot be read: {error}") from None


Handler: TypeAlias = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A handler and what it takes to reach it."""

    handler: Handler
    scope: Scope = Scope.READ
    at_any_time: bool = False
    """Answered before the database is open, and however many requests are under way."""
    is_probe: bool = False
    """That, and without a key."""


class TimeSeriesApp:
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
            deliver(_refusal(error))
            return None
        return self._answer(route, call)

    async def _answer(self, route: Route, call: Call) -> Response:
        self._under_way += 1
        try:
            await asyncio.sleep(0)  # a task of its own: given up when the client leaves
            return await route.handler(call)
        except Exception as error:  # noqa: BLE001
            return _refusal(error)
        finally:
            self._under_way -= 1

    def screen(self, request: Request) -> Response | None:
        """The same checks by the head alone."""
        try:
            self._admit(request)
        except Exception as error:  # noqa: BLE001
            return _refusal(error)
        return None

    def fault(self, fault: Fault, message: str) -> Response:
        status, kind = _FAULTS.get(fault, (503, "unavailable"))
        return _error(status, kind, message)

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


def response_of(answer: Answer) -> Response:
    """An answer of the API as a response; 503 says when to come back."""
    headers = [_RETRY] if answer.status == 503 else []
    return Response(answer.status, answer.body, content_type=answer.content_type.encode(), headers=headers)


def _refusal(error: Exception) -> Response:
    if isinstance(error, Refusal):
        status = STATUS[error.code]
        return _error(status, error.code if status != 400 else "bad_data", str(error), error.headers)
    if isinstance(error, FlushError | Shutdown):
        # Not the sender's fault, and whoever serves next will take it: senders come again on 503.
        return _error(503, "unavailable", str(error))
    if isinstance(error, PenstockError):
        answer = error_answer(error)
        if answer.status == 500:
            _LOG.error("a request failed", exc_info=error)
        return response_of(answer)
    _LOG.error("a request failed", exc_info=error)
    return _error(500, "internal", "the server failed; its log says why")


def _error(status: int, kind: str, message: str, headers: HeaderList = ()) -> Response:
    body = msgspec.json.encode({"status": "error", "errorType": kind, "error": message})
    return Response(status, body, headers=[*headers, _RETRY] if status in (429, 503) else headers)
