"""From a request to a handler of a database: key, path, method, scope, readiness, cap.

How requests and errors are worded is the API's own.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from penstock.errors import Unavailable
from penstock.http import Fault, Request, Response, Router
from penstock.servers.auth import Keyring, Scope
from penstock.servers.errors import MethodNotAllowed, PayloadTooLarge, UnknownPath

__all__ = ["RETRY", "DatabaseApp", "DatabaseRoute"]

RETRY: Final = (b"retry-after", b"1")
"""Goes with every answer that asks the client to come again."""
_READING: Final = "readers"
_WRITING: Final = "writers"

C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class DatabaseRoute(Generic[C]):
    """A handler and what it takes to reach it."""

    handler: Callable[[C], Awaitable[Response]]
    scope: Scope = Scope.READ
    at_any_time: bool = False
    """Answered before the database is open, and however many requests are under way."""
    is_probe: bool = False
    """That, and without a key."""
    body_bytes_max: Callable[[], int] | None = None
    """What a body may have here once the database is open, if that is less than the server takes."""


class DatabaseApp(abc.ABC, Generic[C]):
    """An `Application` of routes behind keys."""

    def __init__(
        self,
        router: Router[DatabaseRoute[C]],
        keys: Keyring,
        *,
        check_ready: Callable[[], None],
        requests_max: int,
    ) -> None:
        self._router = router
        self._keys = keys
        self._check_ready = check_ready
        self._requests_max = requests_max
        # Apart, because writers may all wait for a storage that does not answer, and readers need not.
        self._under_way = {_READING: 0, _WRITING: 0}
        self.opening_s: Callable[[], float] | None = None
        """While the database is being opened: for how long it has been."""

    @abc.abstractmethod
    def call(self, request: Request, name: str) -> C:
        """One admitted request, and the name in its path, as handlers take it."""

    @abc.abstractmethod
    def refusal(self, error: Exception, request: Request) -> Response:
        """The answer to a request that failed. Never raises."""

    @abc.abstractmethod
    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        """The answer to what never became a request; `head` is what is known of it, if anything is."""

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        """Answer, whatever happens; see `Application.begin`."""
        try:
            route, name = self._admit(request)
        except Exception as error:  # noqa: BLE001 - a bug must not take the connection with it
            deliver(self._refused(error, request))
            return None
        return self._answer(route, request, name)

    async def _answer(self, route: DatabaseRoute[C], request: Request, name: str) -> Response:
        kind = _kind(route)
        self._under_way[kind] += 1
        try:
            await asyncio.sleep(0)  # a task of its own: given up when the client leaves
            return await route.handler(self.call(request, name))
        except Exception as error:  # noqa: BLE001
            return self._refused(error, request)
        finally:
            self._under_way[kind] -= 1

    def screen(self, request: Request) -> Response | None:
        """The same checks by the head alone."""
        try:
            self._admit(request)
        except Exception as error:  # noqa: BLE001
            return self._refused(error, request)
        return None

    def _refused(self, error: Exception, request: Request) -> Response:
        if self.opening_s is not None and isinstance(error, Unavailable):
            error = Unavailable(f"{error}, for {self.opening_s():.0f} s now")
        return self.refusal(error, request)

    def _admit(self, request: Request) -> tuple[DatabaseRoute[C], str]:
        match = self._router.match(request.path)
        route = match.methods.get(request.method) if match is not None else None
        if route is not None and match is not None and route.is_probe:
            return route, match.name
        principal = self._keys.principal(request.headers.get(b"authorization"))
        if match is None:
            raise UnknownPath("nothing is at this path")
        if route is None:
            allowed = match.allowed
            raise MethodNotAllowed(f"use {allowed.decode()} for this path", headers=[(b"allow", allowed)])
        principal.require(route.scope)
        if not route.at_any_time:
            self._check_ready()
            if self._under_way[_kind(route)] >= self._requests_max:
                most = f"{self._requests_max} requests of {_kind(route)}"
                raise Unavailable(f"{most} are under way, which is the cap")
            if route.body_bytes_max is not None:
                _check_size(request, route.body_bytes_max())
        return route, match.name


def _check_size(request: Request, bytes_max: int) -> None:
    """By the body, or by what the head says of one that has not come yet. Raises `PayloadTooLarge`."""
    declared = request.headers.get(b"content-length", b"")
    size = max(len(request.body), int(declared) if declared.isdigit() else 0)
    if size > bytes_max:
        raise PayloadTooLarge(f"the body has {size:,} bytes; here it may have at most {bytes_max:,} bytes")


def _kind(route: DatabaseRoute[C]) -> str:
    """Readers, or those who wait for the storage to write."""
    return _READING if route.scope is Scope.READ else _WRITING
