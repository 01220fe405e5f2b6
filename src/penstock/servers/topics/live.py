"""Everything that stays open: watches over server-sent events, and WebSockets."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.http import Router
from penstock.servers.app import Route
from penstock.servers.auth import Keyring, Scope
from penstock.servers.caps import LongLived, StreamLimits
from penstock.servers.topics.fanout import Hub
from penstock.servers.topics.seam import TopicsEngine
from penstock.servers.topics.watch import WatchApi
from penstock.servers.topics.websocket import WebSocketApi

__all__ = ["LiveApi"]


class LiveApi:
    """The live part of the API: one hub, one count of what is open. `drain` says goodbye to everybody."""

    def __init__(self, engine: TopicsEngine, clock: Clock, limits: StreamLimits | None = None) -> None:
        limits = StreamLimits() if limits is None else limits
        self.hub = Hub(clock, engine.scheduler, beat_ms_min=limits.heartbeat_ms_min)
        self.caps = LongLived(limits)
        self._watch = WatchApi(engine, self.hub, self.caps, limits, clock)
        self._socket = WebSocketApi(engine, self.hub, self.caps)

    @property
    def connections(self) -> int:
        """Streams and WebSockets that are open."""
        return self.caps.total

    @property
    def sessions(self) -> int:
        """Watch sessions, with and without a stream."""
        return len(self._watch.sessions)

    @property
    def waiting(self) -> int:
        """Topics that have something to deliver."""
        return self.hub.waiting

    def add_routes(self, router: Router[Route], keys: Keyring) -> None:
        self._watch.keys = keys
        router.add(b"POST", b"/v0/watch", Route(handler=self._watch.create, scope=Scope.READ))
        router.add(
            b"GET", b"/v0/watch/{name}", Route(handler=self._watch.open, asks_key=True, is_stream=True)
        )

        router.add(b"GET", b"/v0/ws", Route(handler=self._socket.open, is_stream=True))

    def drain(self) -> None:
        """Tell every client that the server leaves."""
        self.hub.shut_down()
