"""What waits for a commit, and what happens when it is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

from penstock.errors import PenstockError, StorageFull
from penstock.files import Entry, LogPosition
from penstock.topics.errors import CommitFailed
from penstock.topics.frame import EncodedBatch
from penstock.topics.model import WriteResult
from penstock.topics.topic import Topic

__all__ = ["Append", "Change", "Done", "commit_error"]

T = TypeVar("T")
Done: TypeAlias = Callable[[WriteResult | PenstockError], None]
"""Told once what became of a write."""


def commit_error(error: PenstockError) -> PenstockError:
    """What the writer is told: a full disk is worth waiting for, anything else is a fault of the server."""
    if isinstance(error, StorageFull | CommitFailed):
        return error
    return CommitFailed(f"the log could not be written, nothing was published: {error}")


class Change(Generic[T]):
    """A change of a topic: `apply` is called once it is committed, and its result is what the caller gets."""

    __slots__ = ("_apply", "outcome")

    def __init__(self, apply: Callable[[], T]) -> None:
        self._apply = apply
        self.outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def committed(self, entry: Entry, position: LogPosition) -> None:
        try:
            result = self._apply()
        except Exception as error:  # noqa: BLE001 - it is handed to the caller
            # The change is durable all the same, and everything behind it has to be decided too.
            if not self.outcome.done():
                self.outcome.set_exception(error)
            return
        if not self.outcome.done():
            self.outcome.set_result(result)

    def failed(self, error: PenstockError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(commit_error(error))


class Append:
    """The records of one write. They are published whether or not anybody still waits for the answer.

    `done` is called once, with what became of them.
    """

    __slots__ = (
        "_batch",
        "_created",
        "_done",
        "_now_ms",
        "_on_published",
        "_reserved",
        "_skip_bytes",
        "_topic",
    )

    def __init__(
        self,
        topic: Topic,
        batch: EncodedBatch,
        now_ms: int,
        created: bool,
        on_published: Callable[[Topic], None],
        done: Done,
    ) -> None:
        self._topic = topic
        self._batch = batch
        self._now_ms = now_ms
        self._created = created
        self._on_published = on_published
        self._done: Done | None = done
        self._skip_bytes = 0
        self._reserved = 0

    def behind(self, frames: Sequence[bytes], reserved: int) -> None:
        """These frames go before the records in the same entry, and reserve so many sequence numbers."""
        self._skip_bytes = sum(map(len, frames))
        self._reserved = reserved

    def committed(self, entry: Entry, position: LogPosition) -> None:
        topic = self._topic
        if self._reserved > topic.reserved_seq:
            topic.reserved_seq = self._reserved
        if entry.byte_count:
            at = position.offset + self._skip_bytes
            topic.publish(self._batch, file=position.file, base=at, now_ms=self._now_ms)
        else:
            # It only waited for its turn.
            topic.keep_in_memory(self._batch, now_ms=self._now_ms)
        self._on_published(topic)
        self._tell(self._result(entry.append_s * 1000, entry.sync_s * 1000, entry.held_s * 1000))

    def keep(self) -> None:
        """Publish the records of an ephemeral topic without a commit."""
        self._topic.keep_in_memory(self._batch, now_ms=self._now_ms)
        self._on_published(self._topic)
        self._tell(self._result(0.0, 0.0))

    def failed(self, error: PenstockError) -> None:
        self._tell(commit_error(error))

    def _tell(self, outcome: WriteResult | PenstockError) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(outcome)

    def _result(self, append_ms: float, sync_ms: float, held_ms: float = 0.0) -> WriteResult:
        topic, last_seq = self._topic, self._batch.last_seq
        return WriteResult(
            topic=topic.name,
            first_seq=self._batch.first_seq,
            last_seq=last_seq,
            head_seq=max(last_seq, topic.index.head_seq),
            created=self._created,
            deduped=False,
            wal_append_ms=append_ms,
            fsync_ms=sync_ms if topic.config.durable else 0.0,
            throttle_wait_ms=held_ms,
        )
