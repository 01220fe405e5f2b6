"""Health of the fleet over HTTP: `/health`, `/ready` and `/metrics`, in front of another application."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from penstock.errors import PenstockError
from penstock.http import (
    NOBODY,
    App,
    Application,
    Call,
    Fault,
    Forbidden,
    MethodNotAllowed,
    Policy,
    Principal,
    Refusal,
    Request,
    Response,
    Route,
    Scope,
    TransportFault,
    UnknownPath,
)
from penstock.metrics import Registry
from penstock.up.fleet import Fleet
from penstock.up.status import PartState, PartStatus

_LOG = logging.getLogger(__name__)

_FAULTS: Final = {
    Fault.MALFORMED: 400,
    Fault.TOO_LARGE: 413,
    Fault.OVERLOADED: 503,
    Fault.FORBIDDEN: 403,
}
_STATUS: Final = {Forbidden.code: 403, UnknownPath.code: 404, MethodNotAllowed.code: 405}
_HEADERS: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"


class Front(App[Call]):
    """An `Application` that serves the probes of the fleet and passes other requests to `inner`.

    Probes need no key, so responses contain only names and states. `check` raises `PenstockError` for a
    request that must be refused.
    """

    def __init__(
        self,
        fleet: Fleet,
        inner: Application | None = None,
        *,
        check: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._fleet = fleet
        self._check = check
        own = ((b"/health", self._health), (b"/ready", self._ready), (b"/metrics", self._metrics))
        routes = [
            (method, path, Route(handler=handler, scope=Scope.NONE))
            for path, handler in own
            for method in (b"GET", b"HEAD")
        ]
        policy = Policy(
            call=Call,
            authenticate=self._authenticate,
            missed=self._missed,
            hides_paths=False,
            fallback=inner,
            headers=_HEADERS,
        )
        super().__init__(routes, policy, _refusal)

    def _authenticate(self, request: Request) -> Principal:
        try:
            self._check(request)
        except PenstockError as error:
            raise Forbidden(str(error)) from error
        return NOBODY

    def _missed(self, request: Request, allowed: bytes | None) -> Exception:
        if allowed is None:
            return UnknownPath("nothing is at this path; there are /health, /ready and /metrics")
        self._authenticate(request)
        return MethodNotAllowed("only GET is allowed here")

    async def _health(self, call: Call) -> Response:
        return Response(200, msgspec.json.encode({"status": "ok"}))

    async def _ready(self, call: Call) -> Response:
        answer = readiness_of(self._fleet.parts())
        return Response(200 if answer["ready"] else 503, msgspec.json.encode(answer))

    async def _metrics(self, call: Call) -> Response:
        return Response(200, metrics_of(self._fleet.parts()).encode(), content_type=_TEXT)


def readiness_of(parts: Sequence[PartStatus]) -> dict[str, object]:
    """Return whether every enabled part is ready, and which parts are not.

    Reasons are left out: an error may contain details that only the operator should see.
    """
    fine = (PartState.READY, PartState.DISABLED)
    waiting = [{"name": part.name, "state": part.state.value} for part in parts if part.state not in fine]
    return {"ready": not waiting, "not_ready": waiting}


def metrics_of(parts: Sequence[PartStatus]) -> str:
    """Return the states of the parts as Prometheus text."""
    registry = Registry()
    state = registry.gauge(
        "fleet.part_state", "1 for the state that a part is in, 0 for every other.", ("part", "kind", "state")
    )
    restarts = registry.counter("fleet.part_restarts", "How often a part was restarted.", ("part", "kind"))
    for part in parts:
        restarts.inc(part.restarts, part=part.name, kind=part.kind.value)
        for one in PartState:
            state.set(float(one is part.state), part=part.name, kind=part.kind.value, state=one.value)
    return registry.prometheus_text()


def _refusal(error: Exception, request: Request | None) -> Response:
    if isinstance(error, TransportFault):
        status = _FAULTS[error.fault]
    elif isinstance(error, Refusal) and error.code in _STATUS:
        status = _STATUS[error.code]
    else:
        _LOG.error("a request failed", exc_info=error)
        return _error(500, "the request failed; see the log of `penstock up`")
    return _error(status, str(error))


def _error(status: int, message: str) -> Response:
    return Response(status, msgspec.json.encode({"error": message}))
