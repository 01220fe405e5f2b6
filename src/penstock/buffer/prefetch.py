"""Fetching ahead of delivery: the next few batches, bounded in number and in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from penstock.buffer.errors import StorageError
from penstock.buffer.fetch import BatchDescriptor, ConsumedBatch, FetchHandle

__all__ = ["Prefetcher"]


class Prefetcher:
    """Keeps tasks for the batches that will be asked for next, in that order.

    A failed fetch is forgotten when it is taken, so that asking again tries again.
    """

    def __init__(self, fetcher: FetchHandle, *, ahead: int, bytes_max: int) -> None:
        self._fetcher = fetcher
        self._ahead = ahead
        self._bytes_max = bytes_max
        self._tasks: deque[tuple[int, asyncio.Task[ConsumedBatch]]] = deque()
        self._usual_bytes: int | None = None  # of one batch, by those seen last; None until one is known

    def plan(self, upcoming: Sequence[BatchDescriptor]) -> None:
        """Start fetching `upcoming` (in order, the first is wanted now) as far as the bounds allow."""
        if self._tasks and (not upcoming or self._tasks[0][0] != upcoming[0].sequence or self._head_failed()):
            self.cancel()
        for descriptor in upcoming[len(self._tasks) : self._ahead + 1]:
            if self._tasks and not self._has_room():
                return
            task = asyncio.get_running_loop().create_task(self._fetcher.fetch(descriptor))
            self._tasks.append((descriptor.sequence, task))

    def _head_failed(self) -> bool:
        """A fetch ahead of time that failed is no news by now: it is tried again when it is wanted."""
        task = self._tasks[0][1]
        return task.done() and (task.cancelled() or task.exception() is not None)

    def _has_room(self) -> bool:
        """Whether one more fits: what waits is known, what is under way is taken to be of the usual size."""
        sizes = [
            len(task.result().block.data)
            for _, task in self._tasks
            if task.done() and not task.cancelled() and not task.exception()
        ]
        self._usual_bytes = max(sizes, default=self._usual_bytes)
        if self._usual_bytes is None:
            return False
        under_way = len(self._tasks) - len(sizes) + 1
        return sum(sizes) + under_way * self._usual_bytes <= self._bytes_max

    async def take(self) -> ConsumedBatch:
        """The first planned batch. A cancelled caller loses nothing: the fetch goes on for the next one.

        Raises `StorageError` if the fetch was forgotten meanwhile.
        """
        sequence, task = self._tasks[0]
        try:
            batch = await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            self._drop(task)
            if _caller_is_cancelled():
                raise
            # Not meant for the caller: taken for its own, it would end the caller's task without a word.
            raise StorageError(
                f"the consumer was closed or started anew while it fetched batch {sequence}"
            ) from None
        except BaseException:
            self._drop(task)
            raise
        self._usual_bytes = len(batch.block.data)
        return batch

    def taken(self) -> None:
        """The first batch was delivered, unless everything was forgotten meanwhile."""
        if self._tasks:
            self._tasks.popleft()

    def _drop(self, task: asyncio.Task[ConsumedBatch]) -> None:
        if self._tasks and self._tasks[0][1] is task:
            self.cancel()

    def cancel(self) -> None:
        """Forget everything that was fetched ahead."""
        while self._tasks:
            _, task = self._tasks.popleft()
            task.cancel()
            task.add_done_callback(_ignore_error)


def _caller_is_cancelled() -> bool:
    caller = asyncio.current_task()
    return caller is not None and caller.cancelling() > 0


def _ignore_error(task: asyncio.Task[ConsumedBatch]) -> None:
    if not task.cancelled():
        task.exception()
