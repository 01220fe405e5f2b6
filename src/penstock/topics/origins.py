"""Origins that stand in a destination before the copy was made: an `exactly_once` router makes no second one.

A router's own copies carry origins that it is past. Only who writes to the destination directly, or another
router, can bring one that is still to come, so each record that the router did not write is looked at once,
if it has meta. At the beginning that is what the log of the destination has, which a checkpoint bounds: what
is in segments by then is not searched again.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

import msgspec
import numpy as np

from penstock.jsontext import shallow
from penstock.topics.copying import ROUTER_KEY, CopyStyle, key_of, stored_records
from penstock.topics.payload import split_payload
from penstock.topics.segment import HAS_META
from penstock.topics.topic import Topic

__all__ = ["Origins"]

_MARK: Final = ROUTER_KEY.encode()
_ORIGIN_LEVELS: Final = 2
"""An origin is an object in an object; what lies deeper is not looked at."""


class _Origin(msgspec.Struct):
    idempotency_key: str
    source_seq: int


class _Meta(msgspec.Struct, rename={"origin": ROUTER_KEY}):
    origin: _Origin


_META: Final = msgspec.json.Decoder(_Meta)


class Origins:
    """Which records of the source one router need not copy any more, although it has not come to them."""

    __slots__ = ("_order", "_places", "_seen_seq")

    def __init__(self, dest: Topic) -> None:
        self._seen_seq = dest.index.first_log_seq - 1
        self._places: dict[int, int] = {}
        """Where in the destination the origin of a record of the source stands."""
        self._order: list[int] = []
        """The same records of the source, as a heap."""

    def passed(self, dest: Topic, cursor: int) -> None:
        """The router has written the last records of the destination; up to its cursor it is through."""
        self._seen_seq = dest.index.head_seq
        while self._order and self._order[0] <= cursor:
            self._places.pop(heappop(self._order), None)

    def look(self, dest: Topic, style: CopyStyle) -> None:
        """Look at what came into the destination since the last time."""
        index = dest.index
        at = max(self._seen_seq + 1, index.earliest_seq)
        self._seen_seq = max(self._seen_seq, index.head_seq)
        while (found := index.run_from(at)) is not None:
            run, start = found
            file, stop = run.file_of(start)
            view = dest.view(run, file)
            if view is not None:
                told = run.is_live(start, stop) & ((run.flags[start:stop] & HAS_META) != 0)
                places: list[int] = (start + np.flatnonzero(told)).tolist()
                for place, stored in zip(places, stored_records(run, places, view), strict=True):
                    if stored is not None and _MARK in stored.payload:
                        self._note(run.first_seq + place, stored.payload, style)
            at = run.first_seq + stop

    def _note(self, seq: int, payload: bytes, style: CopyStyle) -> None:
        meta = split_payload(payload)[1]
        try:
            origin = _META.decode(shallow(meta or b"", _ORIGIN_LEVELS).text).origin
        except msgspec.MsgspecError:
            return  # it has the words somewhere, and is no origin
        if origin.idempotency_key == key_of(origin.source_seq, style):
            if origin.source_seq not in self._places:
                heappush(self._order, origin.source_seq)
            self._places[origin.source_seq] = seq

    def takes(self, source_seq: int, dest: Topic) -> bool:
        """Whether the destination has this record, alive. A pass that fails asks again."""
        place = self._places.get(source_seq)
        return place is not None and dest.index.locate(place) is not None
