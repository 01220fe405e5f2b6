"""The console: a page and its API on one port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from typing import Final

import msgspec

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.console.access import ACT, Access, ConsoleSettings
from penstock.console.app import BODY_BYTES_MAX, Call, ConsoleApp, Route, StaticFiles, json_answer, read_body
from penstock.console.buffers_panel import BuffersPanel
from penstock.console.databases_panel import DatabasesPanel
from penstock.console.live import LiveHub, last_id
from penstock.console.overview import overview
from penstock.console.pipelines_panel import PipelinesPanel
from penstock.console.quivers_panel import QuiversPanel
from penstock.console.redrive import RedrivePanel
from penstock.console.sources import Sources
from penstock.console.tail import TailPanel
from penstock.console.topics_panel import TopicsPanel
from penstock.console.trace import TracePanel
from penstock.errors import Unavailable
from penstock.http import Application, HttpLimits, Listener, Response, Scope, no_key
from penstock.servers import HEADERS, is_loopback
from penstock.up import FleetView

_LOG = logging.getLogger(__name__)
_STATIC: Final = os.path.join(os.path.dirname(__file__), "static")
_HISTORY_EVERY_S: Final = 10.0
_EVENTS: Final = b"text/event-stream"


class _Token(msgspec.Struct, forbid_unknown_fields=True):
    token: str


_TOKEN: Final = msgspec.json.Decoder(_Token)


class Console:
    """The console of a fleet.

    console = Console(fleet, ConsoleSettings())
    await console.start()
    print(console.url)
    ...
    await console.close()

    Without a viewer, nothing is polled except the depth of each queue, every ten seconds.
    """

    def __init__(
        self,
        fleet: FleetView,
        settings: ConsoleSettings,
        *,
        clock: Clock = SYSTEM_CLOCK,
        front: Callable[[Application], Application] = lambda app: app,
    ) -> None:
        """Create the console. `front` may wrap its application, to serve more on the same port."""
        self._front = front
        self._settings = settings
        self._clock = clock
        self._access = Access(
            settings.keys,
            clock,
            host=settings.host,
            is_loopback=is_loopback(settings.host),
            names=settings.allowed_hosts,
            sessions_file=settings.sessions_file,
        )
        self._sources = Sources(fleet, clock)
        self._address: tuple[str, int] | None = None
        self._token = ""
        self._listener: Listener | None = None
        self._live: LiveHub | None = None
        self._buffers = BuffersPanel(self._sources)
        self._redrive: RedrivePanel | None = None
        self._noting: asyncio.Task[None] | None = None

    async def start(self) -> tuple[str, int]:
        """Start serving and return the address. Raise `Unavailable` if the port is in use."""
        self._sources.refresh()
        self._live = LiveHub(self._sources)
        app = ConsoleApp(self._access, StaticFiles(_STATIC), self._routes(self._live))
        listener = Listener(self._front(app), HttpLimits.for_bodies(BODY_BYTES_MAX), clock=self._clock)
        host, port = self._settings.host, self._settings.port
        try:
            self._address = await listener.bind(host, port)
        except OSError as error:
            await self.close()
            why = os.strerror(error.errno) if error.errno else str(error)
            raise Unavailable(f"the console cannot listen on {host}:{port}: {why}") from error
        self._listener = listener
        self._access.bound(self._address[1])
        self.new_url()
        self._noting = asyncio.get_running_loop().create_task(self._note())
        return self._address

    @property
    def url(self) -> str:
        """The URL of the page. Without keys, its fragment contains a token for one session."""
        assert self._address is not None, "the console is not started"
        host, port = self._address
        shown = f"[{host}]" if ":" in host else host
        fragment = f"#token={self._token}" if self._token else ""
        return f"http://{shown}:{port}/console{fragment}"

    def new_url(self) -> str:
        """Return `url` with a new token. The previous token becomes invalid. Sessions stay open."""
        self._token = "" if self._access.asks_keys else self._access.new_token()
        return self.url

    async def close(self) -> None:
        """Notify all viewers and stop. Idempotent."""
        if self._noting is not None:
            self._noting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._noting
            self._noting = None
        if self._redrive is not None:
            await self._redrive.close()
        if self._live is not None:
            await self._live.close()
            self._live = None
        if self._listener is not None:
            await self._listener.drain(timeout_s=1.0)
            self._listener = None
        await self._buffers.close()
        await self._sources.close()

    async def _note(self) -> None:
        """Record the depth of the queues, even without a viewer."""
        while True:
            try:
                self._sources.refresh()
                queues = list(self._sources.queues.values())
                if queues:
                    await asyncio.wait([asyncio.ensure_future(queue.main.renew(5.0)) for queue in queues])
                for queue in queues:
                    queue.note()
            except Exception:  # noqa: BLE001 - the history continues with its next point
                _LOG.exception("the depth of the queues could not be recorded")
            await self._clock.sleep(_HISTORY_EVERY_S)

    def _routes(self, live: LiveHub) -> list[tuple[bytes, bytes, Route]]:
        topics, tail, trace = TopicsPanel(self._sources), TailPanel(self._sources), TracePanel(self._sources)
        quivers, pipelines = QuiversPanel(self._sources), PipelinesPanel(self._sources)
        databases = DatabasesPanel(self._sources)
        redrive = self._redrive = RedrivePanel(self._sources, live)

        async def stream(call: Call) -> Response:
            live.check_room()
            return Response(200, content_type=_EVENTS, headers=HEADERS, stream=live.stream(last_id(call)))

        get, post = b"GET", b"POST"
        return [
            (post, b"session", Route(handler=self._session, scope=Scope.NONE, auth=no_key)),
            (get, b"overview", Route(handler=self._overview)),
            (get, b"live", Route(handler=stream)),
            (get, b"buffers", Route(handler=self._buffers.index)),
            (get, b"buffers/{name}", Route(handler=self._buffers.show)),
            (get, b"topics", Route(handler=topics.index)),
            (get, b"topics/{name}", Route(handler=topics.show)),
            (get, b"topics/{name}/tail", Route(handler=tail.tail)),
            (get, b"routers", Route(handler=topics.routers)),
            (get, b"quivers", Route(handler=quivers.index)),
            (get, b"quivers/{name}", Route(handler=quivers.show)),
            (get, b"pipelines", Route(handler=pipelines.index)),
            (get, b"pipelines/{name}", Route(handler=pipelines.show)),
            (get, b"pipelines/{name}/dead-letters", Route(handler=pipelines.letters)),
            (get, b"pipelines/{name}/redrive", Route(handler=redrive.index)),
            (post, b"pipelines/{name}/redrive", Route(handler=redrive.begin, scope=ACT)),
            (get, b"databases", Route(handler=databases.index)),
            (post, b"databases/{name}/query", Route(handler=databases.query)),
            (post, b"databases/{name}/search", Route(handler=databases.search)),
            (get, b"trace", Route(handler=trace.trace)),
        ]

    async def _session(self, call: Call) -> Response:
        cookie = self._access.begin_session(call.request, read_body(call, _TOKEN).token)
        return Response(204, headers=[cookie, (b"cache-control", b"no-store")])

    async def _overview(self, call: Call) -> Response:
        self._sources.refresh()
        waits = [asyncio.ensure_future(poller.renew(1.0)) for poller in self._sources.pollers()]
        if waits:
            await asyncio.wait(waits, timeout=1.0)
        return json_answer(overview(self._sources))
