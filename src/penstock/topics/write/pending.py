"""Batches of writes that wait for their commit.

Writes to one topic that arrive in one turn of the event loop are encoded and committed merged. Encoding,
the log entry and the index rows cost more per call than per record. Under load, one turn of the loop carries
many requests, so this cost is paid once for all of them. Each write keeps its own sequence numbers and its
own response, and is atomic across a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from penstock.errors import PenstockError
from penstock.storage import Entry, LogPosition
from penstock.topics.config import Durability
from penstock.topics.log.frame import EncodedBatch
from penstock.topics.log.payload import PreparedBatch, Text
from penstock.topics.model import WriteResult
from penstock.topics.topic.changes import commit_error
from penstock.topics.topic.topic import Topic

_LOGGER = logging.getLogger(__name__)

Done: TypeAlias = Callable[[WriteResult | Exception], None]
"""A callback that is called once, with the result of a write or the error that prevented it."""
Write: TypeAlias = tuple[int, bool, Done]
"""The record count, whether the topic was created for the write, and the callback for the outcome."""


class PendingAppend:
    """The records of writes to one topic, in order of arrival, committed merged.

    They are published even if the callers have gone. The callback of each write is called once, with its
    outcome.
    """

    __slots__ = ("_batch", "_now_ms", "_on_published", "_reserved", "_skip_bytes", "_topic", "_writes")

    def __init__(
        self,
        topic: Topic,
        batch: EncodedBatch,
        now_ms: int,
        on_published: Callable[[Topic], None],
        writes: Sequence[Write],
    ) -> None:
        self._topic = topic
        self._batch = batch
        self._now_ms = now_ms
        self._on_published = on_published
        self._writes = writes
        self._skip_bytes = 0
        self._reserved = 0

    def prepend(self, frames: Sequence[bytes], reserved: int) -> None:
        """Put frames before the records in the same entry. They reserve sequence numbers up to `reserved`."""
        self._skip_bytes = sum(map(len, frames))
        self._reserved = reserved

    def committed(self, entry: Entry, position: LogPosition) -> None:
        topic = self._topic
        if self._reserved > topic.log.reserved_seq:
            topic.log.reserved_seq = self._reserved
        if entry.byte_count:
            at = position.offset + self._skip_bytes
            topic.publish(self._batch, file=position.file, base=at, now_ms=self._now_ms)
        else:
            # The entry was empty and only kept the order.
            topic.keep_in_memory(self._batch, now_ms=self._now_ms)
        self._on_published(topic)
        self._succeed(entry.append_s * 1000, entry.sync_s * 1000, entry.held_s * 1000)

    def keep(self) -> None:
        """Publish the records of an ephemeral topic without a commit."""
        self._topic.keep_in_memory(self._batch, now_ms=self._now_ms)
        self._on_published(self._topic)
        self._succeed(0.0, 0.0, 0.0)

    def failed(self, error: PenstockError) -> None:
        writes, self._writes = self._writes, ()
        report_failure(writes, error)

    def _succeed(self, append_ms: float, sync_ms: float, held_ms: float) -> None:
        writes, self._writes = self._writes, ()
        topic = self._topic
        name, head_seq = topic.name, topic.log.index.head_seq
        if not topic.config.durable:
            sync_ms = 0.0
        first_seq = self._batch.first_seq
        for count, created, done in writes:
            next_seq = first_seq + count
            result = WriteResult(
                topic=name,
                first_seq=first_seq,
                last_seq=next_seq - 1,
                head_seq=head_seq,
                created=created,
                deduped=False,
                wal_append_ms=append_ms,
                fsync_ms=sync_ms,
                throttle_wait_ms=held_ms,
            )
            first_seq = next_seq
            try:
                done(result)
            except Exception:
                # An error in one callback must not prevent the other calls.
                _LOGGER.exception("the outcome of a write could not be reported")


def report_failure(writes: Sequence[Write], error: PenstockError) -> None:
    """Report to the callbacks that nothing of these writes is published."""
    failure = commit_error(error)
    for _, _, done in writes:
        try:
            done(failure)
        except Exception:
            _LOGGER.exception("the outcome of a write could not be reported")


BATCH_BYTES_MAX: Final = 256 * 1024
"""The size at which a batch is submitted. Larger batches gain nothing and exceed the processor's caches."""


class AppendBatch:
    """Writes to a topic that are not submitted yet. All get the timestamp of the first one."""

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
        self.ts_ms = max(now_ms, topic.log.last_ts_ms)
        self.first_seq = topic.log.next_seq
        self.count = 0
        self.accounted_bytes = 0
        self.ends: list[int] = []
        """The number of the last record of each write, counted from 1."""
        self.writes: list[Write] = []
        self._data: list[Text] = []

    def takes(self, prepared: PreparedBatch, durability: Durability | None) -> bool:
        """Return whether a write can be encoded merged with the gathered ones."""
        first = self.first
        return (
            prepared.headers is None
            and first.headers is None
            and prepared.node == first.node
            and durability is self.durability
        )

    def add(self, prepared: PreparedBatch, created: bool, done: Done) -> None:
        self.count += prepared.count
        self.accounted_bytes += prepared.accounted_bytes
        self.ends.append(self.count)
        self.writes.append((prepared.count, created, done))
        if prepared.headers is None:
            self._data += prepared.data

    def merged(self) -> PreparedBatch:
        """Return all records as one batch."""
        first = self.first
        if len(self.writes) == 1:
            return first
        return PreparedBatch(
            count=self.count,
            data=self._data,
            accounted_bytes=self.accounted_bytes,
            node=first.node,
            headers=None,
            tags=[],
        )
