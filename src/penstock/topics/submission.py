"""What waits for a commit, and what happens when it is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.errors import PenstockError, StorageFull
from penstock.files import Entry, LogPosition
from penstock.topics.errors import CommitFailed
from penstock.topics.frame import EncodedBatch
from penstock.topics.topic import Topic

__all__ = ["Append", "Change", "commit_error"]

T = TypeVar("T")


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

    An entry without bytes only waited for its turn: its records are kept in memory.
    """

    __slots__ = (
        "_batch",
        "_now_ms",
        "_on_published",
        "_reserved",
        "_skip_bytes",
        "_topic",
        "outcome",
    )

    def __init__(
        self,
        topic: Topic,
        batch: EncodedBatch,
        *,
        skip_bytes: int,
        reserved: int,
        now_ms: int,
        on_published: Callable[[Topic], None],
    ) -> None:
        self._topic = topic
        self._batch = batch
        self._skip_bytes = skip_bytes
        self._reserved = reserved
        self._now_ms = now_ms
        self._on_published = on_published
        self.outcome: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()

    def committed(self, entry: Entry, position: LogPosition) -> None:
        topic = self._topic
        topic.reserved_seq = max(topic.reserved_seq, self._reserved)
        if entry.byte_count:
            at = position.offset + self._skip_bytes
            topic.publish(self._batch, file=position.file, base=at, now_ms=self._now_ms)
        else:
            topic.keep_in_memory(self._batch, now_ms=self._now_ms)
        self._on_published(topic)
        if not self.outcome.done():
            self.outcome.set_result(entry)

    def failed(self, error: PenstockError) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(commit_error(error))
