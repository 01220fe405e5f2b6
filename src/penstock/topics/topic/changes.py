"""Changes of a topic: commit them, and notify those who wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from penstock.errors import PenstockError, StorageFull
from penstock.storage import Entry, LogPosition
from penstock.topics.errors import CommitFailed

T = TypeVar("T")


def commit_error(error: PenstockError) -> PenstockError:
    """Return the error for the writer: a full disk may be waited for, the rest are faults of the server."""
    if isinstance(error, StorageFull | CommitFailed):
        return error
    failed = CommitFailed(f"the log could not be written, nothing was published: {error}")
    failed.__cause__ = error
    return failed


class PendingCommit(Generic[T]):
    """A submission to the log: `apply` is called once it is committed, `undo` if it fails.

    One of them is called even if the caller has gone. `outcome` gets what `apply` returns, or the error.
    """

    __slots__ = ("_apply", "_undo", "outcome")

    def __init__(
        self, apply: Callable[[Entry, LogPosition], T], undo: Callable[[], None] | None = None
    ) -> None:
        self._apply = apply
        self._undo = undo
        self.outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def committed(self, entry: Entry, position: LogPosition) -> None:
        try:
            result = self._apply(entry, position)
        except PenstockError as error:
            # A refusal, which the caller gets. Anything else is a bug, and the shard takes no more writes.
            if not self.outcome.done():
                self.outcome.set_exception(error)
            return
        if not self.outcome.done():
            self.outcome.set_result(result)

    def failed(self, error: PenstockError) -> None:
        if self._undo is not None:
            self._undo()
        if not self.outcome.done():
            self.outcome.set_exception(commit_error(error))


def sync_ms(entry: Entry, position: LogPosition) -> float:
    """How long the sync of an entry took, as the result of a commit that has nothing to apply."""
    return entry.sync_s * 1000


class Subscribers:
    """The waiters of one topic, each woken once, and its listeners, called at every change.

    A waiter is registered before the first look at the topic, so that a record published between the look and
    the wait wakes it: there is no moment in which a wake-up can be lost.
    """

    __slots__ = ("_listening", "_waiting")

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._listening: tuple[Callable[[], None], ...] = ()

    def listen(self, tell: Callable[[], None]) -> None:
        """Call this at every change from now on; it must neither wait nor raise."""
        self._listening = (*self._listening, tell)

    def unlisten(self, tell: Callable[[], None]) -> None:
        """No longer call this."""
        self._listening = tuple(other for other in self._listening if other != tell)

    @contextmanager
    def register(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done as soon as the topic changes after this moment."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            yield waiter
        finally:
            self._waiting.discard(waiter)
            waiter.cancel()

    def notify(self) -> None:
        """Notify all: something was published, or the topic was deleted."""
        if self._waiting:
            woken, self._waiting = self._waiting, set()
            for waiter in woken:
                if not waiter.done():
                    waiter.set_result(None)
        for tell in self._listening:
            tell()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def are_there(self) -> bool:
        """Whether anybody waits or listens."""
        return bool(self._waiting or self._listening)
