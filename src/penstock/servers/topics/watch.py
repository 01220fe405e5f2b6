"""`/v0/watch`: sessions over server-sent events."""

from __future__ import annotations

from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.http import Call, Keyring, NotAcceptable, Principal, Response, Unauthorized, UnknownPath
from penstock.servers.caps import StreamLimiter, StreamLimits
from penstock.servers.topics import bodies
from penstock.servers.topics.answers import elapsed_ms
from penstock.servers.topics.fanout import Hub
from penstock.servers.topics.seam import TopicsEngine
from penstock.servers.topics.sessions import SESSION_TTL_MS, Place, Session, Sessions, names_of
from penstock.servers.topics.sse import HEADERS, SseStream, read_id
from penstock.servers.topics.watch_bodies import HEARTBEAT_MS_MAX, Start, WatchBody, prefix_of, read_watch
from penstock.topics import WATCH_TOPICS_MAX, InvalidRequest, TopicNotFound, Want

__all__ = ["WatchApi", "check_accepts_events"]

_EVENTS: Final = b"text/event-stream"
_ENCODE: Final = msgspec.json.Encoder().encode


class WatchApi:
    """The handlers of watches, over one hub."""

    def __init__(
        self, engine: TopicsEngine, hub: Hub, caps: StreamLimiter, limits: StreamLimits, clock: Clock
    ) -> None:
        self._engine = engine
        self._hub = hub
        self._caps = caps
        self._limits = limits
        self._clock = clock
        self.sessions = Sessions(engine, clock, sessions_max=limits.sessions_max)
        self.keys = Keyring()

    async def create(self, call: Call) -> Response:
        """`POST /v0/watch`"""
        body, want = read_watch(call.request)
        lenient = bodies.query_flag(call.request.query(), "lenient", False)
        starts, prefixes = self._starts(body, call.principal, lenient=lenient)
        for name in starts:
            await self._engine.drain(name)
        self.sessions.check_room()
        session = self._session(call.principal, body, want, starts, prefixes)
        answer = {
            "wid": session.wid,
            "stream_url": f"/v0/watch/{session.wid}",
            "session_ttl_ms": SESSION_TTL_MS,
            "topics": self._told(session),
            "performance": {"server_total_ms": round(elapsed_ms(call.request), 3)},
        }
        return Response(200, _ENCODE(answer))

    def _starts(
        self, body: WatchBody, principal: Principal, *, lenient: bool
    ) -> tuple[dict[str, Start], tuple[str, ...]]:
        """Which topics to follow from where, and the prefixes of those that may appear."""
        starts: dict[str, Start] = {}
        prefixes = []
        for name, start in sorted(body.topics.items()):
            prefix = prefix_of(name)
            if prefix is None:
                principal.require_names((name,))
                starts[name] = start
            else:
                prefixes.append(prefix)
        for prefix in prefixes:
            for name in names_of(self._engine, prefix, principal.name_filter):
                starts.setdefault(name, body.topics[f"{prefix}*"])
        missing = [name for name in starts if not self._engine.exists(name)]
        if missing and not lenient:
            raise TopicNotFound(missing[0])
        found = {name: start for name, start in starts.items() if name not in missing}
        if len(found) > WATCH_TOPICS_MAX:
            raise InvalidRequest(f"more than {WATCH_TOPICS_MAX} topics match; watch them in several sessions")
        return found, tuple(prefixes)

    def _session(
        self,
        principal: Principal,
        body: WatchBody,
        want: Want,
        starts: dict[str, Start],
        prefixes: tuple[str, ...],
    ) -> Session:
        places = {}
        for name, start in starts.items():
            feed = self._engine.feed(name)
            feed.refresh()
            cursor = feed.head_seq if start.tail else start.from_seq
            places[name] = Place(cursor=cursor, epoch=feed.epoch)
        session = Session(
            engine=self._engine,
            hub=self._hub,
            clock=self._clock,
            principal=principal,
            want=want,
            heartbeat_ms=min(max(body.heartbeat_ms, self._limits.heartbeat_ms_min), HEARTBEAT_MS_MAX),
            places=places,
            prefixes=prefixes,
            on_rest=self.sessions.rest,
        )
        self.sessions.add(session)
        return session

    def _told(self, session: Session) -> dict[str, dict[str, int]]:
        told = {}
        for name, cursor in sorted(session.cursors().items()):
            state = self._engine.state(name, touch=False)
            told[name] = {
                "from_seq": cursor,
                "head_seq": state.head_seq,
                "earliest_seq": state.earliest_seq,
            }
        return told

    async def open(self, call: Call) -> Response:
        """`GET /v0/watch/:wid`: 406, 404, 401, 429, then the stream."""
        request = call.request
        check_accepts_events(request.headers.get(b"accept"))
        session = self.sessions.find(call.name)
        if session is None:
            raise UnknownPath(
                "there is no such watch session, or it was idle for too long; create another one"
            )
        if self.keys.authenticate_with_token(request) is not session.principal:
            raise Unauthorized("a watch is opened with the key that created it")
        for name in session.cursors():
            await self._engine.drain(name)
        session.release()
        self._caps.check(session.principal)
        session.rewind(read_id(request.headers.get(b"last-event-id", b"")))
        stream = SseStream(self._hub, self._caps, session)
        return Response(200, content_type=_EVENTS, headers=HEADERS, live=stream)


def check_accepts_events(accept: bytes | None) -> None:
    """Raises `NotAcceptable` for a client that does not take events."""
    if accept is not None and _EVENTS not in accept and b"*/*" not in accept:
        raise NotAcceptable("this is a stream of events: accept text/event-stream")
