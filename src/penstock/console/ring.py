"""The last events, with rising ids: who comes back is told what it missed, or that there is a gap. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
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
    """What came behind an id: a gap, if events are gone, and the events that are kept, by their ids.

    Kept events may lie inside the gap: another lane keeps them for longer.
    """

    gap: tuple[int, int] | None
    events: list[Event]

    @property
    def gap_ident(self) -> int:
        """The id to tell the gap with, before the events: whoever goes on behind it misses none of them."""
        assert self.gap is not None
        last = self.gap[1]
        return min(last, self.events[0].ident - 1) if self.events else last


class _Lane:
    """The last events of some names."""

    __slots__ = ("_bytes", "events", "lost")

    def __init__(self, lost: int) -> None:
        self.events: deque[Event] = deque()
        self.lost = lost
        """The newest id that is not here any more."""
        self._bytes = 0

    def push(self, event: Event, events_max: int, bytes_max: int) -> None:
        events = self.events
        events.append(event)
        self._bytes += len(event.data)
        while len(events) > events_max or (self._bytes > bytes_max and len(events) > 1):
            gone = events.popleft()
            self._bytes -= len(gone.data)
            self.lost = gone.ident

    def after(self, ident: int) -> Iterator[Event]:
        """Newest first."""
        for event in reversed(self.events):
            if event.ident <= ident:
                return
            yield event


class Ring:
    """Keeps the last events, by count and by bytes.

    Names that are set `apart` have a lane each, with the same limits: what is pushed under others does not
    push them out. Ids rise over all lanes. They begin at the moment of the start, so that they rise over
    restarts too: an id of an earlier process is below all of this one's, and what happened in between is told
    as a gap.
    """

    def __init__(self, start_ms: int, *, events_max: int, bytes_max: int, apart: Iterable[str] = ()) -> None:
        self._next = start_ms * _IDS_PER_MS
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._common = _Lane(self.last)
        self._apart = {name: _Lane(self.last) for name in apart}

    @property
    def last(self) -> int:
        """The newest id; before the first event, one below it."""
        return self._next - 1

    def _lane(self, name: str) -> _Lane:
        return self._apart.get(name, self._common)

    def push(self, name: str, data: bytes) -> Event:
        event = Event(self._next, name, data)
        self._next += 1
        self._lane(name).push(event, self._events_max, self._bytes_max)
        return event

    def after(self, ident: int) -> Missed:
        """Everything behind `ident`. An id from the future is none of ours: all that is there is told."""
        behind = ident if ident <= self.last else -1
        lanes = (self._common, *self._apart.values())
        events = [event for lane in lanes for event in lane.after(behind)]
        events.sort(key=lambda event: event.ident)
        lost = max(lane.lost for lane in lanes)
        return Missed(gap=(behind + 1, lost) if behind < lost else None, events=events)

    def newest(self, name: str, limit: int) -> list[Event]:
        """The last events of one name, oldest first."""
        found: list[Event] = []
        for event in reversed(self._lane(name).events):
            if event.name == name:
                found.append(event)
                if len(found) == limit:
                    break
        found.reverse()
        return found
