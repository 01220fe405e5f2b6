"""`/v0/watch`: sessions over server-sent events, and their positions."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.errors import Corrupt, PenstockError
from penstock.http import Call, Keyring, Principal, Response, Unauthorized, UnknownPath
from penstock.servers.errors import told
from penstock.servers.limits import StreamLimiter, StreamLimits
from penstock.servers.topics import bodies
from penstock.servers.topics.answers import damaged_in, elapsed_ms
from penstock.servers.topics.bodies import HEARTBEAT_MS_MAX, Start, WatchBody, prefix_of, read_watch
from penstock.servers.topics.broadcaster import Broadcaster, Subscriber
from penstock.servers.topics.sse import EVENTS, HEADERS, RETRY, check_accepts_events, event, read_id, write_id
from penstock.servers.topics.subscription import RenderedPage, Subscription, quoted
from penstock.topics import (
    RETRY_AFTER_MS,
    SEQ_MAX,
    WATCH_TOPICS_MAX,
    Damaged,
    Engine,
    InvalidRequest,
    SubscriptionFilter,
    Throttled,
    Tombstone,
    TopicNotFound,
)

SESSION_TTL_MS: Final = 300_000
_ID_BYTES: Final = 16
_ENCODE: Final = msgspec.json.Encoder().encode
_SHUTTING_DOWN: Final = b'{"code":"server_shutting_down","message":"the server is shutting down; reconnect"}'


@dataclass(slots=True, kw_only=True)
class Place:
    """The position of a session in one incarnation of a topic."""

    cursor: int
    epoch: int


class Session:
    """The topics that one client follows. At most one stream is open; a new one replaces it."""

    def __init__(
        self,
        *,
        engine: Engine,
        broadcaster: Broadcaster,
        clock: Clock,
        principal: Principal,
        want: SubscriptionFilter,
        heartbeat_ms: int,
        places: dict[str, Place],
        prefixes: tuple[str, ...] = (),
        on_rest: Callable[[Session], None],
    ) -> None:
        self.wid = f"wid_{secrets.token_urlsafe(_ID_BYTES)}"
        self.principal = principal
        self.heartbeat_ms = heartbeat_ms
        self.stream: SseStream | None = None
        self.idle_since_s = clock.monotonic()
        self._engine = engine
        self._broadcaster = broadcaster
        self._clock = clock
        self._want = want
        self._places = places
        self._prefixes = prefixes
        self._on_rest = on_rest

    def now_ms(self) -> int:
        return self._clock.now_ms()

    @property
    def is_single(self) -> bool:
        """Whether an event's id contains one topic only."""
        return len(self._places) == 1

    @property
    def is_over(self) -> bool:
        """Whether the session has no topics and cannot get new ones."""
        return not self._places and not self._prefixes

    @property
    def has_prefixes(self) -> bool:
        return bool(self._prefixes)

    def cursors(self) -> dict[str, int]:
        """Return the client's position in each topic, as handed to the connection."""
        cursors = {name: place.cursor for name, place in self._places.items()}
        if self.stream is not None:
            for name, subscription in self.stream.subscriptions.items():
                cursors[name] = subscription.cursor
        return cursors

    def rewind(self, seen: Mapping[str, int]) -> None:
        """Move back to the positions that the client has seen, where it has seen less than was sent."""
        for name, place in self._places.items():
            place.cursor = min(place.cursor, seen.get(name, place.cursor))

    # ---- the stream ----------------------------------------------------------------------------------

    def started(self, stream: SseStream) -> None:
        """Follow every topic, in order of name: a stream has opened."""
        self.stream = stream
        self._join_all()
        for name in sorted(self._places):
            if stream.is_open:
                self._follow(name)
        if self.is_over:
            stream.end()

    def release(self) -> None:
        """End an open stream: its client has reconnected."""
        if self.stream is not None:
            self.stream.end()

    def stopped(self, stream: SseStream) -> None:
        """Save the stream's positions: it has closed."""
        for name, subscription in stream.subscriptions.items():
            if name in self._places:
                self._places[name].cursor = subscription.cursor
        self.stream = None
        self.idle_since_s = self._clock.monotonic()
        self._on_rest(self)

    def _follow(self, name: str) -> None:
        stream, place = self.stream, self._places[name]
        assert stream is not None
        try:
            feed = self._engine.feed(name)
        except TopicNotFound:
            stream.send_deleted(name)
            return
        if feed.epoch != place.epoch:
            # Another topic of the same name: start over, and report to the client that it is new.
            place.cursor, place.epoch = SEQ_MAX, feed.epoch
        self._broadcaster.follow(stream, feed, place.cursor, self._want)

    def lost(self, name: str) -> None:
        """Remove a deleted topic, even if a new topic takes its name."""
        self._places.pop(name, None)

    # ---- topics that appear --------------------------------------------------------------------------

    def appeared(self, name: str) -> None:
        """Follow a newly created topic from its start, if its name matches a prefix."""
        if self.stream is not None and self._join(name):
            self._follow(name)

    def _join_all(self) -> None:
        for prefix in self._prefixes:
            for name in names_of(self._engine, prefix, self.principal.name_filter):
                self._join(name)

    def _join(self, name: str) -> bool:
        if name in self._places or not name.startswith(self._prefixes or ("\0",)):
            return False
        if not self.principal.may_name(name):
            return False
        if len(self._places) >= WATCH_TOPICS_MAX:
            if self.stream is not None:
                text = f"{name} is not followed: this session has {WATCH_TOPICS_MAX} topics already"
                self.stream.warn(429, text, [name])
            return False
        self._places[name] = Place(cursor=0, epoch=self._engine.feed(name).epoch)
        return True


class SseStream(Subscriber):
    """The open stream of a session. Records handed to the connection count as read."""

    def __init__(self, broadcaster: Broadcaster, caps: StreamLimiter, session: Session) -> None:
        super().__init__(broadcaster, caps, session.principal, beat_s=session.heartbeat_ms / 1000)
        self._session = session

    def begin(self) -> None:
        self.send(RETRY)
        self._session.started(self)

    def left(self) -> None:
        self._session.stopped(self)

    # ---- messages ------------------------------------------------------------------------------------

    def send_page(self, subscription: Subscription, page: RenderedPage, *, caught_up: bool) -> None:
        if page.tombstone is None and self._session.is_single:
            frame = page.frames.get(caught_up)
            if frame is None:
                ident = write_id({subscription.feed.name: page.to_seq})
                frame = page.frames[caught_up] = self._frames(subscription, page, ident, caught_up)
            self.send(frame)
            return
        gap = b"" if page.tombstone is None else self._gap(subscription, page, page.tombstone)
        ident = self._ident(subscription, page.to_seq)
        self.send(gap + self._frames(subscription, page, ident, caught_up))

    def _gap(self, subscription: Subscription, page: RenderedPage, gap: Tombstone) -> bytes:
        reason = gap.reason if subscription.has_read or gap.reason == "recreated" else "from_seq_too_old"
        data = {
            "topic": subscription.feed.name,
            "reason": reason,
            "gap_from": gap.gap_from,
            "gap_to": gap.gap_to,
            "earliest_seq": gap.earliest_seq,
            "head_seq": gap.head_seq,
        }
        return event(b"tombstone", _ENCODE(data), self._ident(subscription, page.from_seq))

    def _frames(self, subscription: Subscription, page: RenderedPage, ident: bytes, caught_up: bool) -> bytes:
        records = event(b"record", b"{" + page.records, ident) if page.has_records else b""
        return records + (_caught_up(subscription.feed.name, page.to_seq, ident) if caught_up else b"")

    def send_caught_up(self, subscription: Subscription) -> None:
        ident = self._ident(subscription, subscription.cursor)
        self.send(_caught_up(subscription.feed.name, subscription.cursor, ident))

    def topic_deleted(self, subscription: Subscription) -> None:
        """Report the deletion; the stream ends with its last topic."""
        self.broadcaster.unfollow(subscription)
        self.send_deleted(subscription.feed.name)

    def send_deleted(self, name: str) -> None:
        data = b'{"topic":%b,"head_seq":0,"reason":"deleted"}' % quoted(name)
        self.send(event(b"topic-deleted", data, write_id(self._session.cursors())))
        self._session.lost(name)
        if self._session.is_over:
            self.end()

    def fail(self, subscription: Subscription, error: PenstockError) -> None:
        """End the stream, so that the client reconnects and resumes from its position."""
        if isinstance(error, Damaged):
            error = damaged_in(subscription.feed.name, error)
        code = 500 if isinstance(error, Corrupt) else 503
        self.send(
            event(b"error", _ENCODE({"code": code, "error": told(error), "topic": subscription.feed.name}))
        )
        self.end()

    def warn(self, code: int, text: str, topics: list[str]) -> None:
        """Send a warning; the stream continues."""
        self.send(event(b"error", _ENCODE({"code": code, "error": text, "topics": topics})))

    def send_deferred(self, topics: list[str]) -> None:
        text = (
            "the server is overloaded and delays topics with negative priority; poll them until this clears"
        )
        data = {"code": 429, "error": text, "retry_after_ms": RETRY_AFTER_MS, "topics": topics}
        self.send(event(b"error", _ENCODE(data)))

    def heartbeat(self) -> None:
        if self.is_writable:
            self.send(b": hb %d\n\n" % self._session.now_ms())

    def shut_down(self) -> None:
        self.send(event(b"error", _SHUTTING_DOWN))
        self.end()

    def _ident(self, subscription: Subscription, seq: int) -> bytes:
        return write_id(self._session.cursors() | {subscription.feed.name: seq})


def _caught_up(name: str, head_seq: int, ident: bytes) -> bytes:
    return event(b"caught-up", b'{"topic":%b,"head_seq":%d}' % (quoted(name), head_seq), ident)


class Sessions:
    """All sessions of a server, by their ids."""

    def __init__(self, engine: Engine, clock: Clock, *, sessions_max: int) -> None:
        self._clock = clock
        self._sessions_max = sessions_max
        self._by_id: dict[str, Session] = {}
        self._resting: dict[str, Session] = {}
        """Sessions without a stream, the longest idle one first."""
        self._engine = engine
        self._is_listening = False

    def __len__(self) -> int:
        return len(self._by_id)

    def check_room(self) -> None:
        """Drop idle sessions. Raise `Throttled` if the limit is still reached."""
        self.collect()
        if self._sessions_max and len(self._by_id) >= self._sessions_max:
            raise Throttled(
                f"there are {len(self._by_id)} watch sessions, which is the limit; idle ones end after 300 s",
                {"limit": "max_watch_sessions", "max": self._sessions_max},
            )

    def add(self, session: Session) -> None:
        self._by_id[session.wid] = self._resting[session.wid] = session
        if session.has_prefixes and not self._is_listening:
            self._is_listening = True
            self._engine.on_topic(self._appeared)

    def find(self, wid: str) -> Session | None:
        """Return the session, or None if it has expired or has nothing left to follow."""
        self.collect()
        return self._by_id.get(wid)

    def collect(self) -> None:
        """Drop expired sessions, whose clients did not return."""
        oldest_s = self._clock.monotonic() - SESSION_TTL_MS / 1000
        while self._resting:
            wid, session = next(iter(self._resting.items()))
            if session.stream is None and session.idle_since_s >= oldest_s:
                return
            del self._resting[wid]
            if session.stream is None:
                del self._by_id[wid]

    def rest(self, session: Session) -> None:
        """Mark a session as idle: its stream has ended."""
        self._resting.pop(session.wid, None)
        if session.is_over:
            del self._by_id[session.wid]
        else:
            self._resting[session.wid] = session

    def _appeared(self, name: str) -> None:
        for session in list(self._by_id.values()):
            if session.has_prefixes:
                with contextlib.suppress(PenstockError):  # deleted again, or the server is shutting down
                    session.appeared(name)


def names_of(engine: Engine, prefix: str, allowed: Callable[[str], bool] | None) -> list[str]:
    """Return the first topics with this prefix, at most one more than a session may have."""
    states, _ = engine.topics(prefix=prefix, limit=WATCH_TOPICS_MAX + 1, allowed=allowed)
    return [state.topic for state in states]


class WatchApi:
    """The handlers of watches."""

    def __init__(
        self,
        engine: Engine,
        broadcaster: Broadcaster,
        caps: StreamLimiter,
        limits: StreamLimits,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._broadcaster = broadcaster
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
            "topics": self._topics_of(session),
            "performance": {"server_total_ms": round(elapsed_ms(call.request), 3)},
        }
        return Response(200, _ENCODE(answer))

    def _starts(
        self, body: WatchBody, principal: Principal, *, lenient: bool
    ) -> tuple[dict[str, Start], tuple[str, ...]]:
        """Return the start in each topic to follow, and the prefixes of topics that may be created later."""
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
        want: SubscriptionFilter,
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
            broadcaster=self._broadcaster,
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

    def _topics_of(self, session: Session) -> dict[str, dict[str, int]]:
        topics = {}
        for name, cursor in sorted(session.cursors().items()):
            state = self._engine.state(name, touch=False)
            topics[name] = {
                "from_seq": cursor,
                "head_seq": state.head_seq,
                "earliest_seq": state.earliest_seq,
            }
        return topics

    async def open(self, call: Call) -> Response:
        """`GET /v0/watch/:wid`: 406, 404, 401, 429, then the stream."""
        request = call.request
        check_accepts_events(request.headers.get(b"accept"))
        session = self.sessions.find(call.name)
        if session is None:
            raise UnknownPath("this watch session does not exist or has expired; create another one")
        if self.keys.authenticate_with_token(request) is not session.principal:
            raise Unauthorized("open a watch with the key that created it")
        for name in session.cursors():
            await self._engine.drain(name)
        session.release()
        self._caps.check(session.principal)
        session.rewind(read_id(request.headers.get(b"last-event-id", b"")))
        stream = SseStream(self._broadcaster, self._caps, session)
        return Response(200, content_type=EVENTS, headers=HEADERS, live=stream)
