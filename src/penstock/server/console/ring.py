"""The last events, with rising ids: who comes back is told what it missed, or that there is a gap. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

__all__ = ["Event", "Missed", "Ring"]

_IDS_PER_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened. `data` is JSON."""

    ident: int
    name: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """What came behind an id: first a gap, if events between are gone, then the events."""

    gap: tuple[int, int] | None
    events: list[Event]


class Ring:
    """Keeps the last events, by count and by bytes.

    Ids begin at the moment of the start, so that they rise over restarts too: an id of an earlier process is
    below all of this one's, and what happened in between is told as a gap.
    """

    def __init__(self, start_ms: int, *, events_max: int, bytes_max: int) -> None:
        self._events: deque[Event] = deque()
        self._first = self._next = start_ms * _IDS_PER_MS
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._bytes = 0

    @property
    def last(self) -> int:
        """The newest id; before the first event, one below it."""
        return self._next - 1

    def push(self, name: str, data: bytes) -> Event:
        event = Event(self._next, name, data)
        self._next += 1
        self._events.append(event)
        self._bytes += len(data)
        while len(self._events) > self._events_max or (
            self._bytes > self._bytes_max and len(self._events) > 1
        ):
            gone = self._events.popleft()
            self._bytes -= len(gone.data)
            self._first = gone.ident + 1
        return event

    def after(self, ident: int) -> Missed:
        """Everything behind `ident`. An id from the future is none of ours: all that is there is told."""
        if ident > self.last:
            return Missed(gap=(0, self._first - 1), events=list(self._events))
        gap = (ident + 1, self._first - 1) if ident + 1 < self._first else None
        start = max(0, ident + 1 - self._first)
        return Missed(gap=gap, events=[self._events[place] for place in range(start, len(self._events))])

    def newest(self, name: str, limit: int) -> list[Event]:
        """The last events of one name, oldest first."""
        found: list[Event] = []
        for event in reversed(self._events):
            if event.name == name:
                found.append(event)
                if len(found) == limit:
                    break
        found.reverse()
        return found
