"""How the whole is, over HTTP: `/health`, `/ready` and `/metrics`, in front of whatever else is served."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Final

import msgspec

from penstock.errors import PenstockError
from penstock.http import Application, Fault, Request, Response
from penstock.metrics import Registry
from penstock.up.fleet import Fleet
from penstock.up.status import PartState, PartStatus

__all__ = ["Front", "metrics_of", "readiness_of"]

_STATUS: Final = {
    Fault.MALFORMED: 400,
    Fault.TOO_LARGE: 413,
    Fault.OVERLOADED: 503,
    Fault.FORBIDDEN: 403,
}
_HEADERS: Final = ((b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store"))
_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"


class Front:
    """An `Application`: answers for the fleet itself, and gives the rest to `behind`.

    Nobody is asked for a key, so the answers hold no more than names and states. `check` raises
    `PenstockError` for a request that is to be told nothing.
    """

    def __init__(
        self,
        fleet: Fleet,
        behind: Application | None = None,
        *,
        check: Callable[[Request], None] = lambda request: None,
    ) -> None:
        self._fleet = fleet
        self._behind = behind
        self._check = check
        self._own: dict[bytes, Callable[[], Response]] = {
            b"/health": self._health,
            b"/ready": self._ready,
            b"/metrics": self._metrics,
        }

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        """See `Application.begin`."""
        own = self._own.get(request.path)
        if own is not None:
            deliver(_secured(self._answer(request, own)))
            return None
        if self._behind is not None:
            return self._behind.begin(request, deliver)
        deliver(_secured(_refusal(404, "there is nothing here; /health, /ready and /metrics are")))
        return None

    def _answer(self, request: Request, own: Callable[[], Response]) -> Response:
        try:
            self._check(request)
        except PenstockError as error:
            return _refusal(403, str(error))
        is_read = request.method in (b"GET", b"HEAD")
        return own() if is_read else _refusal(405, "only GET is answered here")

    def screen(self, request: Request) -> Response | None:
        """See `Application.screen`."""
        return None if self._behind is None else self._behind.screen(request)

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        """See `Application.fault`."""
        if self._behind is not None:
            return self._behind.fault(fault, message, head)
        return _secured(_refusal(_STATUS[fault], message))

    def _health(self) -> Response:
        return Response(200, msgspec.json.encode({"status": "ok"}))

    def _ready(self) -> Response:
        answer = readiness_of(self._fleet.parts())
        return Response(200 if answer["ready"] else 503, msgspec.json.encode(answer))

    def _metrics(self) -> Response:
        return Response(200, metrics_of(self._fleet.parts()).encode(), content_type=_TEXT)


def readiness_of(parts: Sequence[PartStatus]) -> dict[str, object]:
    """Whether every part that is to run does its work, and which do not.

    Not why: an error may name what only whoever runs the fleet should know.
    """
    fine = (PartState.READY, PartState.DISABLED)
    waiting = [{"name": part.name, "state": part.state.value} for part in parts if part.state not in fine]
    return {"ready": not waiting, "not_ready": waiting}


def metrics_of(parts: Sequence[PartStatus]) -> str:
    """The parts as Prometheus text."""
    registry = Registry()
    state = registry.gauge(
        "fleet.part_state", "1 for the state that a part is in, 0 for every other.", ("part", "kind", "state")
    )
    restarts = registry.counter(
        "fleet.part_restarts", "How often a part was started again.", ("part", "kind")
    )
    for part in parts:
        restarts.inc(part.restarts, part=part.name, kind=part.kind.value)
        for one in PartState:
            state.set(float(one is part.state), part=part.name, kind=part.kind.value, state=one.value)
    return registry.prometheus_text()


def _refusal(status: int, message: str) -> Response:
    return Response(status, msgspec.json.encode({"error": message}))


def _secured(response: Response) -> Response:
    response.headers = [*response.headers, *_HEADERS]
    return response
