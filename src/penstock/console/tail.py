"""The live tail of a topic: the server's watch, converted to events of the console.

Ids are sequences, so a client that reconnects continues after its last one. Missing records, and those that
arrive too fast to be read, are sent as gaps. The newest records are always shown, at most a second later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.console.app import Call
from penstock.console.live import last_id
from penstock.console.poller import reason_of
from penstock.console.sources import Sources
from penstock.console.topics_panel import record_fields
from penstock.errors import InvalidInput, LimitExceeded, PenstockError
from penstock.http import Response
from penstock.servers import HEADERS, RETRY, event
from penstock.servers import told as told_of
from penstock.topics import NODE_BYTES_MAX, TAG_BYTES_MAX, Record, WatchEvent, check_topic_name

TAILS_MAX: Final = 32
RECORDS_PER_S: Final = 500
"""Limit of the records shown per second, which a browser can still draw."""
_HEARTBEAT_MS: Final = 10_000
_BEAT_S: Final = 10.0
"""The interval of heartbeats. A client considers a tail lost after three times as long without an event."""
_BEAT: Final = b": still here\n\n"
_ENCODE: Final = msgspec.json.Encoder().encode
_EVENTS: Final = b"text/event-stream"


class Pace:
    """Limits the records per second. The newest of the excess records wait for the next second."""

    def __init__(self, clock: Clock, per_s: int) -> None:
        self._clock = clock
        self._per_s = per_s
        self._second = clock.monotonic()
        self._left = per_s
        self._held: deque[Record] = deque()
        self._omitted: tuple[int, int] | None = None
        """The first and last sequence that are omitted before the held records."""

    @property
    def wait_s(self) -> float | None:
        """The seconds until held records may pass, or None without held records."""
        if not self._held:
            return None
        return max(0.0, self._second + 1.0 - self._clock.monotonic())

    def take(self, records: Iterable[Record] = ()) -> tuple[tuple[int, int] | None, Sequence[Record]]:
        """Return the first and last omitted sequence, and the records to show after them.

        The newest records are held, up to the limit of a second. Older ones are omitted.
        """
        now = self._clock.monotonic()
        if now - self._second >= 1.0:
            self._second, self._left = now, self._per_s
        self._held.extend(records)
        while len(self._held) > self._per_s:
            seq = self._held.popleft().seq
            self._omitted = (seq if self._omitted is None else self._omitted[0], seq)
        passed = min(self._left, len(self._held))
        self._left -= passed
        return self._passed(passed)

    def rest(self) -> tuple[tuple[int, int] | None, Sequence[Record]]:
        """Return all held records, like `take`, before an event that must not overtake them."""
        return self._passed(len(self._held))

    def _passed(self, count: int) -> tuple[tuple[int, int] | None, Sequence[Record]]:
        if not count:
            return None, ()
        omitted, self._omitted = self._omitted, None
        return omitted, [self._held.popleft() for _ in range(count)]


class TailPanel:
    """The handler for the topics server of the fleet."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._open = 0

    async def tail(self, call: Call) -> Response:
        self._sources.refresh()
        name = check_topic_name(call.name)
        tag, node = _filter(call, "tag", TAG_BYTES_MAX), _filter(call, "node", NODE_BYTES_MAX)
        self._check_room()
        await self._sources.topics.source.state(name)  # a missing topic is a 404, not a stream
        stream = self._stream(name, last_id(call), tag, node)
        return Response(200, content_type=_EVENTS, headers=HEADERS, stream=stream)

    def _check_room(self) -> None:
        if self._open >= TAILS_MAX:
            raise LimitExceeded(f"{TAILS_MAX} tails are open, which is the limit; close one")

    async def _stream(
        self, name: str, after: int | None, tag: str | None, node: str | None
    ) -> AsyncGenerator[bytes, None]:
        try:
            self._check_room()  # check again: several may have passed the first check together
        except LimitExceeded as error:
            yield event(b"error", _ENCODE({"message": told_of(error)}))
            return
        self._open += 1
        pace = Pace(self._sources.clock, RECORDS_PER_S)
        try:
            yield RETRY
            watching = self._sources.topics.source.client.watch(
                {name: "tail" if after is None else after},
                match=tag,
                include_tags=True,
                heartbeat_ms=_HEARTBEAT_MS,
            )
            async with aclosing(watching) as events, aclosing(frames(events, node, pace)) as pieces:
                async for piece in pieces:
                    yield piece
        except (PenstockError, OSError) as error:
            yield event(b"error", _ENCODE({"message": reason_of(error)}))
        finally:
            self._open -= 1


def _filter(call: Call, name: str, bytes_max: int) -> str | None:
    text = call.query.get(name, "")
    if len(text.encode()) > bytes_max:
        raise InvalidInput(f"{name}: at most {bytes_max} bytes")
    return text or None


async def frames(
    events: AsyncGenerator[WatchEvent, None], node: str | None, pace: Pace, beat_s: float = _BEAT_S
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a watch at the limited rate, and a heartbeat after `beat_s` without an event."""
    loop = asyncio.get_running_loop()
    sent_s = loop.time()
    pending: asyncio.Task[WatchEvent | None] | None = None
    try:
        while True:
            if pending is None:
                pending = loop.create_task(_next(events))
            wait_s = sent_s + beat_s - loop.time()
            if pace.wait_s is not None:
                wait_s = min(wait_s, pace.wait_s)
            await asyncio.wait([pending], timeout=max(0.0, wait_s))
            if pending.done():
                one, pending = pending.result(), None
                if one is None:
                    break
                piece = _frames(one, node, pace)
            else:
                piece = _shown(*pace.take())
            if not piece and loop.time() - sent_s >= beat_s:
                piece = _BEAT
            if piece:
                yield piece
                sent_s = loop.time()
        if piece := _shown(*pace.rest()):
            yield piece
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, PenstockError, OSError):
                await pending


async def _next(events: AsyncGenerator[WatchEvent, None]) -> WatchEvent | None:
    return await anext(events, None)


def _frames(one: WatchEvent, node: str | None, pace: Pace) -> bytes:
    if one.kind == "records":
        return _shown(*pace.take(record for record in one.records() if node is None or record.node == node))
    if one.kind == "caught_up":
        # Without an id while records wait, so that a client that reconnects still gets them.
        ident = b"%d" % one.to_seq if pace.wait_s is None else None
        return event(b"caught_up", _ENCODE({"head": one.head_seq}), ident)
    return _shown(*pace.rest()) + _other(one)


def _other(one: WatchEvent) -> bytes:
    if one.kind == "gap" and one.tombstone is not None:
        tombstone = one.tombstone
        return _gap(tombstone.gap_from, tombstone.gap_to, tombstone.reason, one.to_seq)
    if one.kind == "deleted":
        return event(b"deleted", _ENCODE({"topic": one.topic}))
    return event(b"error", _ENCODE({"message": one.message}))


def _shown(omitted: tuple[int, int] | None, records: Sequence[Record]) -> bytes:
    pieces = [event(b"record", _ENCODE(record_fields(one)), b"%d" % one.seq) for one in records]
    if omitted is not None:
        first, last = omitted
        pieces.insert(0, _gap(first, last, "too_fast", last))
    return b"".join(pieces)


def _gap(first: int, last: int, reason: str, ident: int) -> bytes:
    return event(b"gap", _ENCODE({"from": first, "to": last, "reason": reason}), b"%d" % ident)
