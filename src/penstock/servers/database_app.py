"""The application of a database: what its routes have in common beside those of any other.

How requests and errors are worded is the API's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeVar

from penstock.errors import Unavailable
from penstock.http import (
    App,
    Call,
    Errors,
    Keyring,
    Policy,
    Principal,
    Request,
    Response,
    Route,
    Routes,
    Scope,
)

RETRY: Final = (b"retry-after", b"1")
"""Goes with every answer that asks the client to come again."""
_READING: Final = "readers"
_WRITING: Final = "writers"
_READS: Final = (Scope.NONE, Scope.READ)

C = TypeVar("C", bound=Call)


class _UnderWay:
    """Requests of one kind under way. Probes and metrics count, and are never refused."""

    __slots__ = ("_count", "_count_max", "_kind")

    def __init__(self, kind: str, count_max: int) -> None:
        self._kind = kind
        self._count_max = count_max
        self._count = 0

    def check(self) -> None:
        """Raises `Unavailable` when one more would be too many."""
        if self._count >= self._count_max:
            most = f"{self._count_max} requests of {self._kind}"
            raise Unavailable(f"{most} are under way, which is the cap")

    def enter(self, principal: Principal) -> None:
        self._count += 1

    def leave(self, principal: Principal) -> None:
        self._count -= 1


class DatabaseApp(App[C]):
    """An `App` that bounds readers and writers apart, and tells for how long a database has been opening."""

    def __init__(
        self,
        routes: Routes[C],
        keys: Keyring,
        *,
        call: Callable[[Request, Principal, str], C],
        check_ready: Callable[[], None],
        requests_max: int,
        errors: Errors,
    ) -> None:
        policy = Policy(call=call, authenticate=keys.authenticate, check_ready=check_ready, own_task=True)
        super().__init__(_bounded(routes, requests_max), policy, self._refused)
        self._refusal = errors
        self.opening_s: Callable[[], float] | None = None
        """While the database is being opened: for how long it has been."""

    def _refused(self, error: Exception, request: Request | None) -> Response:
        if self.opening_s is not None and isinstance(error, Unavailable):
            error = Unavailable(f"{error}, for {self.opening_s():.0f} s now")
        return self._refusal(error, request)


def _bounded(routes: Routes[C], requests_max: int) -> Iterator[tuple[bytes, bytes, Route[C]]]:
    """The routes with their caps. Those that do not wait for the database are counted, and never refused."""
    # Apart, because writers may all wait for a storage that does not answer, and readers need not.
    under_way = {kind: _UnderWay(kind, requests_max) for kind in (_READING, _WRITING)}
    for method, path, route in routes:
        cap = under_way[_kind(route)]
        check = _both(cap.check, route.check) if route.ready else route.check
        yield method, path, replace(route, cap=cap, check=check)


def _both(has_room: Callable[[], None], check: Callable[[Request], None] | None) -> Callable[[Request], None]:
    def checked(request: Request) -> None:
        has_room()
        if check is not None:
            check(request)

    return checked


def _kind(route: Route[C]) -> str:
    """Readers, or those who wait for the storage to write."""
    return _READING if route.scope in _READS else _WRITING
