"""The end of a topic as it grows: the server's own watch, turned into events of the console.

Ids are sequences, so a client that comes back goes on behind the last one it has. Records that are gone, and
those that come too fast to be read, are told as gaps.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.errors import InvalidInput, LimitExceeded, PenstockError
from penstock.http.message import Response
from penstock.server.console.app import Call
from penstock.server.console.cursor import last_id
from penstock.server.console.sources import Sources
from penstock.server.console.topics_panel import record_fields
from penstock.server.console.watcher import reason_of
from penstock.server.topics.sse import HEADERS, RETRY, event
from penstock.topics.client import WatchEvent
from penstock.topics.limits import NODE_BYTES_MAX, TAG_BYTES_MAX
from penstock.topics.model import Record
from penstock.topics.names import check_topic_name

__all__ = ["TailPanel"]

TAILS_MAX: Final = 32
RECORDS_PER_S: Final = 500
"""What is shown at most; nobody reads faster, and the browser has to draw it."""
_HEARTBEAT_MS: Final = 10_000
_ENCODE: Final = msgspec.json.Encoder().encode
_EVENTS: Final = b"text/event-stream"


class Pace:
    """Lets so many records through in each second."""

    def __init__(self, clock: Clock, per_s: int) -> None:
        self._clock = clock
        self._per_s = per_s
        self._second = clock.monotonic()
        self._left = per_s

    def take(self, records: Sequence[Record]) -> tuple[Sequence[Record], Sequence[Record]]:
        """(left out, let through): the newest are what people want to see."""
        now = self._clock.monotonic()
        if now - self._second >= 1.0:
            self._second, self._left = now, self._per_s
        passed = min(self._left, len(records))
        self._left -= passed
        return records[: len(records) - passed], records[len(records) - passed :]


class TailPanel:
    """The handler, over the topics server of the plan."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._open = 0

    async def tail(self, call: Call) -> Response:
        self._sources.refresh()
        name = check_topic_name(call.name)
        tag, node = _filter(call, "tag", TAG_BYTES_MAX), _filter(call, "node", NODE_BYTES_MAX)
        self._check_room()
        await self._sources.topics.source.state(name)  # a topic that is not there is a 404, not a stream
        stream = self._stream(name, last_id(call), tag, node)
        return Response(200, content_type=_EVENTS, headers=HEADERS, stream=stream)

    def _check_room(self) -> None:
        if self._open >= TAILS_MAX:
            raise LimitExceeded(f"{TAILS_MAX} tails are open, which is the cap; close one")

    async def _stream(
        self, name: str, after: int | None, tag: str | None, node: str | None
    ) -> AsyncGenerator[bytes, None]:
        try:
            self._check_room()  # again: many may have been let in before the first of them got here
        except LimitExceeded as error:
            yield event(b"error", _ENCODE({"message": str(error)}))
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
            async with aclosing(watching) as told:
                async for one in told:
                    piece = _frames(one, node, pace)
                    if piece:
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


def _frames(told: WatchEvent, node: str | None, pace: Pace) -> bytes:
    if told.kind == "gap" and told.tombstone is not None:
        gone = told.tombstone
        return _gap(gone.gap_from, gone.gap_to, gone.reason, told.to_seq)
    if told.kind == "caught_up":
        return event(b"caught_up", _ENCODE({"head": told.head_seq}), b"%d" % told.to_seq)
    if told.kind == "deleted":
        return event(b"deleted", _ENCODE({"topic": told.topic}))
    if told.kind != "records":
        return event(b"error", _ENCODE({"message": told.message}))
    records = [record for record in told.records() if node is None or record.node == node]
    left_out, shown = pace.take(records)
    pieces = []
    if left_out:
        pieces.append(_gap(left_out[0].seq, left_out[-1].seq, "too_fast", left_out[-1].seq))
    pieces += [event(b"record", _ENCODE(record_fields(one)), b"%d" % one.seq) for one in shown]
    return b"".join(pieces)


def _gap(first: int, last: int, reason: str, ident: int) -> bytes:
    return event(b"gap", _ENCODE({"from": first, "to": last, "reason": reason}), b"%d" % ident)
