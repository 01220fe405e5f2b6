"""Watch sessions: what a client wants to follow, and how far it has come in each topic.

A session outlives its connection. It is kept for five minutes without one, so that a client that comes back
goes on where it stopped; what it says it has seen can only take it back, never forward.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.http import Principal
from penstock.servers.topics.fanout import Hub
from penstock.servers.topics.seam import TopicsEngine
from penstock.servers.topics.sse import SseStream
from penstock.topics import SEQ_MAX, WATCH_TOPICS_MAX, Throttled, TopicNotFound, Want

__all__ = ["SESSION_TTL_MS", "Place", "Session", "Sessions"]

SESSION_TTL_MS: Final = 300_000
_ID_BYTES: Final = 16


@dataclass(slots=True, kw_only=True)
class Place:
    """How far a session has come in one instance of a topic."""

    cursor: int
    epoch: int


class Session:
    """What one client follows. At most one stream is open; a second one takes over from it."""

    def __init__(
        self,
        *,
        engine: TopicsEngine,
        hub: Hub,
        clock: Clock,
        principal: Principal,
        want: Want,
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
        self._hub = hub
        self._clock = clock
        self._want = want
        self._places = places
        self._prefixes = prefixes
        self._on_rest = on_rest

    def now_ms(self) -> int:
        return self._clock.now_ms()

    @property
    def is_single(self) -> bool:
        """Whether the id of an event is about one topic only."""
        return len(self._places) == 1

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to follow, nor can come."""
        return not self._places and not self._prefixes

    @property
    def has_prefixes(self) -> bool:
        return bool(self._prefixes)

    def cursors(self) -> dict[str, int]:
        """Where the client stands, as far as the connection took it."""
        cursors = {name: place.cursor for name, place in self._places.items()}
        if self.stream is not None:
            for name, follower in self.stream.followers.items():
                cursors[name] = follower.cursor
        return cursors

    def rewind(self, seen: Mapping[str, int]) -> None:
        """The client has seen less than was sent."""
        for name, place in self._places.items():
            place.cursor = min(place.cursor, seen.get(name, place.cursor))

    # ---- the stream ----------------------------------------------------------------------------------

    def started(self, stream: SseStream) -> None:
        """A stream is open: follow every topic, by name."""
        self.stream = stream
        self._join_all()
        for name in sorted(self._places):
            if stream.is_open:
                self._follow(name)
        if self.is_over:
            stream.end()

    def release(self) -> None:
        """End a stream that is open: its client has come back another way."""
        if self.stream is not None:
            self.stream.end()

    def stopped(self, stream: SseStream) -> None:
        """The stream is closed: remember how far it came."""
        for name, follower in stream.followers.items():
            if name in self._places:
                self._places[name].cursor = follower.cursor
        self.stream = None
        self.idle_since_s = self._clock.monotonic()
        self._on_rest(self)

    def _follow(self, name: str) -> None:
        stream, place = self.stream, self._places[name]
        assert stream is not None
        try:
            feed = self._engine.feed(name)
        except TopicNotFound:
            stream.tell_deleted(name)
            return
        if feed.epoch != place.epoch:
            # Another topic of the same name: nothing of it was read, and the client is told that it is new.
            place.cursor, place.epoch = SEQ_MAX, feed.epoch
        self._hub.follow(stream, feed, place.cursor, self._want)

    def lost(self, name: str) -> None:
        """The topic is gone for good, also if another one gets its name."""
        self._places.pop(name, None)

    # ---- topics that appear --------------------------------------------------------------------------

    def appeared(self, name: str) -> None:
        """A topic was created; it is followed from its beginning if its name is meant."""
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


class Sessions:
    """All sessions of a server, by their ids."""

    def __init__(self, engine: TopicsEngine, clock: Clock, *, sessions_max: int) -> None:
        self._clock = clock
        self._sessions_max = sessions_max
        self._by_id: dict[str, Session] = {}
        self._resting: dict[str, Session] = {}
        """Those without a stream, the one that rests longest first."""
        self._engine = engine
        self._is_listening = False

    def __len__(self) -> int:
        return len(self._by_id)

    def check_room(self) -> None:
        """Raises `Throttled` when there are as many as there may be, after the idle ones went."""
        self.collect()
        if self._sessions_max and len(self._by_id) >= self._sessions_max:
            raise Throttled(
                f"there are {len(self._by_id)} watch sessions, as many as may be; idle ones go after 300 s",
                {"limit": "max_watch_sessions", "max": self._sessions_max},
            )

    def add(self, session: Session) -> None:
        self._by_id[session.wid] = self._resting[session.wid] = session
        if session.has_prefixes and not self._is_listening:
            self._is_listening = True
            self._engine.on_topic(self._appeared)

    def find(self, wid: str) -> Session | None:
        """The session, unless it has been idle for too long or has nothing left to follow."""
        self.collect()
        return self._by_id.get(wid)

    def collect(self) -> None:
        """Forget sessions that nobody came back to."""
        oldest_s = self._clock.monotonic() - SESSION_TTL_MS / 1000
        while self._resting:
            wid, session = next(iter(self._resting.items()))
            if session.stream is None and session.idle_since_s >= oldest_s:
                return
            del self._resting[wid]
            if session.stream is None:
                del self._by_id[wid]

    def rest(self, session: Session) -> None:
        """A stream of it has ended."""
        self._resting.pop(session.wid, None)
        if session.is_over:
            del self._by_id[session.wid]
        else:
            self._resting[session.wid] = session

    def _appeared(self, name: str) -> None:
        for session in list(self._by_id.values()):
            if session.has_prefixes:
                with contextlib.suppress(PenstockError):  # it is gone again, or the server leaves
                    session.appeared(name)


def names_of(engine: TopicsEngine, prefix: str, allowed: Callable[[str], bool] | None) -> list[str]:
    """The first topics whose names begin so, one more than a session may have if there are so many."""
    states, _ = engine.topics(prefix=prefix, limit=WATCH_TOPICS_MAX + 1, allowed=allowed)
    return [state.topic for state in states]
