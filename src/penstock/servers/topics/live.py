"""Everything that stays open: watches over server-sent events, and WebSockets."""

from __future__ import annotations

from penstock.clock import Clock
from penstock.http import Call, Cap, Keyring, Route, Routes, Scope, no_key
from penstock.servers.caps import StreamLimiter, StreamLimits
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
        self.caps = StreamLimiter(limits)
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

    def routes(self, keys: Keyring, cap: Cap) -> Routes[Call]:
        self._watch.keys = keys
        yield b"POST", b"/v0/watch", Route(handler=self._watch.create, scope=Scope.READ, cap=cap)
        # Streams have caps of their own. A watch asks for the key after it has looked at the rest.
        yield b"GET", b"/v0/watch/{name}", Route(handler=self._watch.open, scope=Scope.NONE, auth=no_key)
        yield b"GET", b"/v0/ws", Route(handler=self._socket.open, scope=Scope.NONE)

    def drain(self) -> None:
        """Tell every client that the server leaves."""
        self.hub.shut_down()
