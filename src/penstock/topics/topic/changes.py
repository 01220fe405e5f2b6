"""Changes of a topic: their commit, and the notification of its subscribers."""

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
    """Return the error for the writer. A full disk may clear; every other error is a server fault."""
    if isinstance(error, StorageFull | CommitFailed):
        return error
    failed = CommitFailed(f"the log could not be written, nothing was published: {error}")
    failed.__cause__ = error
    return failed


class PendingCommit(Generic[T]):
    """A submission to the log. It calls `apply` after the commit, or `undo` if the commit fails.

    One of them is called even if the caller is cancelled. `outcome` receives the result of `apply`, or the
    error.
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
            # A refusal that the caller receives. Any other exception is a bug and stops the shard's writes.
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
    """Return the duration of an entry's sync, as the result of a commit that has nothing to apply."""
    return entry.sync_s * 1000


class Subscribers:
    """The waiters of one topic, each woken once, and its listeners, called at every change.

    A caller registers before it reads the topic, so a record that is published between the read and the wait
    still wakes it.
    """

    __slots__ = ("_listening", "_waiting")

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._listening: tuple[Callable[[], None], ...] = ()

    def listen(self, callback: Callable[[], None]) -> None:
        """Call `callback` at every change from now on. It must neither wait nor raise."""
        self._listening = (*self._listening, callback)

    def unlisten(self, callback: Callable[[], None]) -> None:
        """Stop calling `callback`."""
        self._listening = tuple(other for other in self._listening if other != callback)

    @contextmanager
    def register(self) -> Iterator[asyncio.Future[None]]:
        """Yield a future that completes at the first change after this moment."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            yield waiter
        finally:
            self._waiting.discard(waiter)
            waiter.cancel()

    def notify(self) -> None:
        """Notify all waiters and listeners that something was published or the topic was deleted."""
        if self._waiting:
            woken, self._waiting = self._waiting, set()
            for waiter in woken:
                if not waiter.done():
                    waiter.set_result(None)
        for callback in self._listening:
            callback()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def are_there(self) -> bool:
        """Return whether there is a waiter or a listener."""
        return bool(self._waiting or self._listening)
