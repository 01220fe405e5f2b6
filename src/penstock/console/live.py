"""The live stream: changes of the overview, parts and log lines, without silent gaps.

The last events are kept in a ring buffer with increasing ids. A client that reconnects gets the events that
it missed, or a gap event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.console.app import Call
from penstock.console.overview import overview, part_fields
from penstock.console.sources import Attention, Sources
from penstock.errors import LimitExceeded
from penstock.servers import RETRY, event, told
from penstock.up import FleetEvent, LogLine

_LOG = logging.getLogger(__name__)
LOG_LINES_FIRST: Final = 200
STREAMS_MAX: Final = 64
_LINES_HELD: Final = 500
"""The number of earlier log lines that are added at the start."""
_EVENTS_MAX: Final = 4000
_BYTES_MAX: Final = 16 << 20
_TICK_S: Final = 1.0
_BEAT_S: Final = 10.0
_PIECE_BYTES: Final = 1 << 18
"""Bytes prepared for a client at a time, so that a slow client does not hold a copy of all events."""
_TEXT_MAX: Final = 4096
_ENCODE: Final = msgspec.json.Encoder().encode
_BEAT: Final = b": still here\n\n"
_IDS_PER_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """An event. `data` is JSON."""

    ident: int
    name: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """The events after an id: a gap, if events were evicted, and the kept events in the order of their ids.

    Kept events may be inside the gap, because another lane keeps events for longer.
    """

    gap: tuple[int, int] | None
    events: list[Event]

    @property
    def gap_ident(self) -> int:
        """The id of the gap, which is sent before the events. A client that resumes after it misses none."""
        assert self.gap is not None
        last = self.gap[1]
        return min(last, self.events[0].ident - 1) if self.events else last


class _Lane:
    """The last events of certain names."""

    __slots__ = ("_bytes", "events", "lost")

    def __init__(self, lost: int) -> None:
        self.events: deque[Event] = deque()
        self.lost = lost
        """The newest evicted id."""
        self._bytes = 0

    def push(self, one: Event, events_max: int, bytes_max: int) -> None:
        events = self.events
        events.append(one)
        self._bytes += len(one.data)
        while len(events) > events_max or (self._bytes > bytes_max and len(events) > 1):
            evicted = events.popleft()
            self._bytes -= len(evicted.data)
            self.lost = evicted.ident

    def after(self, ident: int) -> Iterator[Event]:
        """Yield the events after an id, newest first."""
        for one in reversed(self.events):
            if one.ident <= ident:
                return
            yield one


class RingBuffer:
    """Keeps the last events, by count and by bytes.

    Names in `apart` have their own lane with the same limits, so that other events do not evict theirs. Ids
    increase over all lanes. They begin with the start time, so they increase over restarts too: the ids of an
    earlier process are lower, and the events in between are reported as a gap.
    """

    def __init__(self, start_ms: int, *, events_max: int, bytes_max: int, apart: Iterable[str] = ()) -> None:
        self._next = start_ms * _IDS_PER_MS
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._common = _Lane(self.last)
        self._apart = {name: _Lane(self.last) for name in apart}

    @property
    def last(self) -> int:
        """The newest id, or before the first event the id below it."""
        return self._next - 1

    def _lane(self, name: str) -> _Lane:
        return self._apart.get(name, self._common)

    def push(self, name: str, data: bytes) -> Event:
        one = Event(self._next, name, data)
        self._next += 1
        self._lane(name).push(one, self._events_max, self._bytes_max)
        return one

    def after(self, ident: int) -> Missed:
        """Return the events after `ident`. For an id that was not assigned yet, return all events."""
        start = ident if ident <= self.last else -1
        lanes = (self._common, *self._apart.values())
        events = [one for lane in lanes for one in lane.after(start)]
        events.sort(key=lambda one: one.ident)
        lost = max(lane.lost for lane in lanes)
        return Missed(gap=(start + 1, lost) if start < lost else None, events=events)

    def newest(self, name: str, limit: int) -> list[Event]:
        """Return the last events of one name, oldest first."""
        found: list[Event] = []
        for one in reversed(self._lane(name).events):
            if one.name == name:
                found.append(one)
                if len(found) == limit:
                    break
        found.reverse()
        return found


def frame(one: Event) -> bytes:
    return event(one.name.encode(), one.data, b"%d" % one.ident)


def in_pieces(events: Iterable[Event]) -> Iterator[bytes]:
    """Yield the frames of events in pieces of limited size."""
    held: list[bytes] = []
    size = 0
    for one in events:
        held.append(frame(one))
        size += len(held[-1])
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def log_fields(line: LogLine) -> dict[str, object]:
    cut = len(line.text) > _TEXT_MAX
    text = line.text[:_TEXT_MAX].encode("utf-8", "replace").decode()
    return {
        "at_ms": line.at_ms,
        "part": line.part,
        "level": line.level.name.lower(),
        "text": text,
        "cut": cut,
    }


class LiveHub:
    """Distributes events to all viewers. Part changes and log lines are kept even without a viewer.

    Log lines have their own lane, so that parts that change often do not evict them. The overview is not
    kept: a new client gets the current one, and a slow client only the newest.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._clock = sources.clock
        self._ring = RingBuffer(
            self._clock.now_ms(), events_max=_EVENTS_MAX, bytes_max=_BYTES_MAX, apart=("log",)
        )
        self._moved: asyncio.Future[None] | None = None
        self._streams = 0
        self._ticking: asyncio.Task[None] | None = None
        self._attention = Attention(sources)
        self._parts: dict[str, bytes] = {}
        """Each part as it was last sent."""
        self._compared: bytes = b""
        self._overview: bytes = b""
        self._overviews = 0
        """The number of overviews that were sent."""
        self._is_over = False
        for line in sources.fleet.log(limit=_LINES_HELD):
            self._ring.push("log", _ENCODE(log_fields(line)))
        self._unsubscribe = sources.fleet.subscribe(self.told)

    def told(self, change: FleetEvent) -> None:
        """Push a part change or a log line.

        Skip a part whose fields have not changed: a fleet also reports progress that is not shown here.
        """
        if isinstance(change, LogLine):
            self.push("log", log_fields(change))
            return
        fields = part_fields(change)
        encoded = _ENCODE(fields)
        if self._parts.get(change.name) != encoded:
            self._parts[change.name] = encoded
            self.push("part", fields)

    def push(self, name: str, fields: object) -> None:
        """Send an event to every client, including those that reconnect later."""
        self._ring.push(name, _ENCODE(fields))
        self._wake()

    def _wake(self) -> None:
        moved, self._moved = self._moved, None
        if moved is not None and not moved.done():
            moved.set_result(None)

    async def close(self) -> None:
        """End every stream."""
        self._is_over = True
        self._unsubscribe()
        self.push("end", {"reason": "the console is shutting down"})
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        self._attention.end()

    def check_room(self) -> None:
        """Raise `LimitExceeded` if one more stream would exceed the cap."""
        if self._streams >= STREAMS_MAX:
            raise LimitExceeded(f"{STREAMS_MAX} live streams are open, which is the limit; close one")

    async def stream(self, after: int | None) -> AsyncGenerator[bytes, None]:
        """Yield frames for one client: events after `after`, or the last log lines and the current state."""
        try:
            self.check_room()  # check again: several may have passed the first check together
        except LimitExceeded as error:
            yield event(b"error", _ENCODE({"message": told(error)}))
            return
        self._streams += 1
        try:
            self._attend()
            yield RETRY
            await self._first_look()
            if after is None:
                first = self._ring.newest("log", LOG_LINES_FIRST)
                after = self._ring.last
                for piece in in_pieces(first):
                    yield piece
            seen: int | None = None
            while True:
                missed = self._ring.after(after)
                after = self._ring.last
                if missed.gap is not None:
                    low, high = missed.gap
                    yield event(b"gap", _ENCODE({"from": low, "to": high}), b"%d" % missed.gap_ident)
                for piece in in_pieces(missed.events):
                    yield piece
                if seen != self._overviews:
                    now = _ENCODE(overview(self._sources)) if seen is None else self._overview
                    seen = self._overviews
                    yield event(b"overview", now, b"%d" % after)
                if self._ring.last != after or seen != self._overviews:
                    continue  # an event arrived during the writes to this client
                if self._is_over:
                    return
                if not await self._news():
                    yield _BEAT
        finally:
            self._streams -= 1
            if not self._streams:
                self._rest()

    async def _news(self) -> bool:
        """Wait for the next event. Return False after `_BEAT_S` without one."""
        if self._moved is None:
            self._moved = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._moved], timeout=_BEAT_S)
        return bool(done)

    async def _first_look(self) -> None:
        """Wait up to a second for the first readings of the sources."""
        waits = [asyncio.ensure_future(poller.renew(1.0)) for poller in self._sources.pollers()]
        if waits:
            await asyncio.wait(waits, timeout=1.0)

    def _attend(self) -> None:
        self._sources.refresh()
        self._attention.follow()
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def _rest(self) -> None:
        self._attention.end()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(_TICK_S)
            try:
                self._sources.refresh()
                self._attention.follow()
                self._show()
            except Exception:  # noqa: BLE001 - one failure must not end the stream for every client
                _LOG.exception("the overview could not be sent")

    def _show(self) -> None:
        """Send the current overview to all clients if it has changed."""
        found = overview(self._sources)
        comparable = _ENCODE({**found, "at_ms": 0})
        if comparable != self._compared:
            self._compared, self._overview = comparable, _ENCODE(found)
            self._overviews += 1
            self._wake()


def last_id(call: Call) -> int | None:
    """Return the last id that the client has, or None if it sends none or an invalid one."""
    header = call.request.headers.get(b"last-event-id", b"").decode("ascii", "replace")
    for text in (header, call.query.get("after", "")):
        if text.isascii() and text.isdigit() and len(text) <= 19:
            return int(text)
    return None
