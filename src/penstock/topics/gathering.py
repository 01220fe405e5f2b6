"""Writes to one topic that come in one turn of the event loop, gathered to be encoded and committed as one.

Encoding, the entry in the log and the rows in the index have a price per call that is higher than that per
record. Under load a turn of the loop has many requests, so that price is paid once for all of them. Each
write keeps its own sequence numbers, its own answer, and is all or nothing after a crash.
"""

from __future__ import annotations

from typing import Final

from penstock.topics.batch import PreparedBatch
from penstock.topics.config import Durability
from penstock.topics.payload import Text
from penstock.topics.submission import Done, Write
from penstock.topics.topic import Topic

__all__ = ["Gathered"]

_BYTES_MAX: Final = 256 * 1024
"""From here on more of them gain nothing, and everything is out of the processor's caches."""


class Gathered:
    """What was written to a topic and not yet submitted. All of it gets the time of the first write."""

    __slots__ = (
        "_data",
        "accounted_bytes",
        "count",
        "durability",
        "ends",
        "first",
        "first_seq",
        "now_ms",
        "topic",
        "ts_ms",
        "writes",
    )

    def __init__(self, topic: Topic, first: PreparedBatch, now_ms: int) -> None:
        self.topic = topic
        self.first = first
        self.durability = topic.config.durability
        self.now_ms = now_ms
        self.ts_ms = max(now_ms, topic.last_ts_ms)
        self.first_seq = topic.next_seq
        self.count = 0
        self.accounted_bytes = 0
        self.ends: list[int] = []
        """Behind which record each write ends, counted from 1."""
        self.writes: list[Write] = []
        self._data: list[Text] = []

    def takes(self, prepared: PreparedBatch, durability: Durability | None) -> bool:
        """Whether a write can be encoded together with those that are here."""
        first = self.first
        return (
            prepared.dressed is None
            and first.dressed is None
            and prepared.node == first.node
            and durability is self.durability
        )

    def add(self, prepared: PreparedBatch, created: bool, done: Done) -> None:
        self.count += prepared.count
        self.accounted_bytes += prepared.accounted_bytes
        self.ends.append(self.count)
        self.writes.append((prepared.count, created, done))
        if prepared.dressed is None:
            self._data += prepared.data

    @property
    def is_full(self) -> bool:
        return self.accounted_bytes >= _BYTES_MAX

    def together(self) -> PreparedBatch:
        """All records as one batch."""
        first = self.first
        if len(self.writes) == 1:
            return first
        return PreparedBatch(
            count=self.count,
            data=self._data,
            accounted_bytes=self.accounted_bytes,
            node=first.node,
            dressed=None,
            tags=[],
        )
