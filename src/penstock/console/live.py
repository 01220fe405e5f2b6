"""The live stream: the overview when it changes, parts and log lines as they come, and no silent gap."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Final

import msgspec

from penstock.console.overview import overview, part_fields
from penstock.console.ring import Event, Ring
from penstock.console.sources import Attention, Sources
from penstock.errors import LimitExceeded
from penstock.servers import RETRY, event, told
from penstock.up import FleetEvent, LogLine

__all__ = ["LiveHub", "frame"]

_LOG = logging.getLogger(__name__)
LOG_LINES_FIRST: Final = 200
STREAMS_MAX: Final = 64
_LINES_HELD: Final = 500
"""Lines of before that are taken over at the start."""
_EVENTS_MAX: Final = 4000
_BYTES_MAX: Final = 16 << 20
_TICK_S: Final = 1.0
_BEAT_S: Final = 10.0
_PIECE_BYTES: Final = 1 << 18
"""What is made for one client at a time: a slow one must not hold a copy of all that is kept."""
_TEXT_MAX: Final = 4096
_ENCODE: Final = msgspec.json.Encoder().encode
_BEAT: Final = b": still here\n\n"


def frame(one: Event) -> bytes:
    return event(one.name.encode(), one.data, b"%d" % one.ident)


def in_pieces(events: Iterable[Event]) -> Iterator[bytes]:
    """Frames of events, some at a time."""
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
    """Everything that happens, for all who watch. Parts and log lines are kept while nobody does.

    Lines are kept apart from the rest, so that parts that change often do not push them out. The overview is
    not kept: whoever comes is told that of now, and whoever reads slowly only the newest.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._clock = sources.clock
        self._ring = Ring(self._clock.now_ms(), events_max=_EVENTS_MAX, bytes_max=_BYTES_MAX, apart=("log",))
        self._moved: asyncio.Future[None] | None = None
        self._streams = 0
        self._ticking: asyncio.Task[None] | None = None
        self._attention = Attention(sources)
        self._parts: dict[str, bytes] = {}
        """Each part as it was told last."""
        self._compared: bytes = b""
        self._overview: bytes = b""
        self._overviews = 0
        """How many were told."""
        self._is_over = False
        for line in sources.fleet.log(limit=_LINES_HELD):
            self._ring.push("log", _ENCODE(log_fields(line)))
        self._unsubscribe = sources.fleet.subscribe(self.told)

    def told(self, change: FleetEvent) -> None:
        """A part changed, or said something. One that looks as it did is not told again: a fleet says so with
        every step of a part's progress, which is not shown here."""
        if isinstance(change, LogLine):
            self.push("log", log_fields(change))
            return
        fields = part_fields(change)
        told = _ENCODE(fields)
        if self._parts.get(change.name) != told:
            self._parts[change.name] = told
            self.push("part", fields)

    def push(self, name: str, fields: object) -> None:
        """Tell everybody, also those who come back."""
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
        """Raises `LimitExceeded` when one more stream would be too many."""
        if self._streams >= STREAMS_MAX:
            raise LimitExceeded(f"{STREAMS_MAX} live streams are open, which is the cap; close one")

    async def stream(self, after: int | None) -> AsyncGenerator[bytes, None]:
        """Frames for one client: behind `after`, or from the last log lines and the state of now."""
        try:
            self.check_room()  # again: many may have been let in before the first of them got here
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
                    continue  # it came while this client was written to
                if self._is_over:
                    return
                if not await self._news():
                    yield _BEAT
        finally:
            self._streams -= 1
            if not self._streams:
                self._rest()

    async def _news(self) -> bool:
        """Wait for the next event; false after a while without one."""
        if self._moved is None:
            self._moved = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._moved], timeout=_BEAT_S)
        return bool(done)

    async def _first_look(self) -> None:
        """Give the sources a moment: most answer within it."""
        waits = [asyncio.ensure_future(watcher.renew(1.0)) for watcher in self._sources.watchers()]
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
            except Exception:  # noqa: BLE001 - one bad moment must not end the stream for everybody
                _LOG.exception("the overview could not be told")

    def _show(self) -> None:
        """Tell everybody the state of now, if it differs from what was told last."""
        found = overview(self._sources)
        told = _ENCODE({**found, "at_ms": 0})
        if told != self._compared:
            self._compared, self._overview = told, _ENCODE(found)
            self._overviews += 1
            self._wake()
