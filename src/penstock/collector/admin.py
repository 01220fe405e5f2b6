"""The collector's own state over HTTP: `/metrics` for Prometheus, `/health`, `/ready`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Final

from penstock.collector.address import Address
from penstock.errors import Unavailable
from penstock.http import Fault, HttpLimits, Listener, Request, Response, Sites
from penstock.metrics import Registry

__all__ = ["AdminServer"]

_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
_LIMITS: Final = HttpLimits(body_bytes_max=1024, body_screened_bytes=1024, connections_max=64)
_STATUS: Final = {
    Fault.MALFORMED: 400,
    Fault.TOO_LARGE: 413,
    Fault.OVERLOADED: 503,
    Fault.FORBIDDEN: 403,
}


class _AdminApp:
    def __init__(self, registry: Registry, is_ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._is_ready = is_ready

    def begin(
        self, request: Request, deliver: Callable[[Response], None]
    ) -> Coroutine[object, None, Response] | None:
        deliver(self._answer(request))
        return None

    def _answer(self, request: Request) -> Response:
        if request.method not in (b"GET", b"HEAD"):
            return Response(405, b"use GET\n", content_type=_TEXT, headers=[(b"allow", b"GET")])
        if request.path == b"/metrics":
            return Response(200, self._registry.prometheus_text().encode(), content_type=_TEXT)
        if request.path == b"/health":
            return Response(200, b"ok\n", content_type=_TEXT)
        if request.path == b"/ready":
            ready = self._is_ready()
            return Response(
                200 if ready else 503, b"ready\n" if ready else b"not ready\n", content_type=_TEXT
            )
        return Response(404, b"there are /metrics, /health and /ready\n", content_type=_TEXT)

    def screen(self, request: Request) -> Response | None:
        return None

    def fault(self, fault: Fault, message: str, head: Request | None = None) -> Response:
        return Response(_STATUS[fault], message.encode(), content_type=_TEXT)


class AdminServer:
    """One port for operators."""

    def __init__(self, registry: Registry, is_ready: Callable[[], bool], sites: Sites | None = None) -> None:
        self._listener = Listener(_AdminApp(registry, is_ready), _LIMITS, sites=sites)

    async def bind(self, address: Address) -> Address:
        """Raises `Unavailable` when the port is taken."""
        try:
            host, port = await self._listener.bind(address.host, address.port)
        except OSError as error:
            raise Unavailable(f"cannot listen on {address}: {error.strerror or error}") from error
        return Address(host, port)

    async def close(self) -> None:
        await self._listener.drain(timeout_s=0.5)
