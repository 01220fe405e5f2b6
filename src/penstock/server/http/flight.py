"""Running an application's coroutine with as little machinery as the request needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import cast

from penstock.server.http.message import Response

__all__ = ["Flight"]


class Flight:
    """One request on its way to its response.

    Most requests either finish at once or wait for a single future, the commit. A task each would cost more
    than the parsing, so the coroutine is driven by the futures it waits for. When it yields without a future
    (`asyncio.sleep(0)`) the rest becomes a task, which `abandon` cancels; otherwise it runs to its end.
    """

    __slots__ = ("_coroutine", "_deliver", "_task")

    def __init__(
        self, coroutine: Coroutine[object, None, Response], deliver: Callable[[Response], None]
    ) -> None:
        self._coroutine = coroutine
        self._deliver: Callable[[Response], None] | None = deliver
        self._task: asyncio.Task[Response] | None = None

    def start(self) -> None:
        """Run the first step; `deliver` may be called before this returns."""
        self._step(None)

    @property
    def is_patient(self) -> bool:
        """Whether it waits in a task of its own, and may therefore wait long."""
        return self._task is not None

    def abandon(self) -> None:
        """Nobody waits for the response any more."""
        self._deliver = None
        if self._task is not None:
            self._task.cancel()

    def _step(self, _: object) -> None:
        try:
            waited = self._coroutine.send(None)
        except StopIteration as done:
            if self._deliver is not None:
                self._deliver(done.value)
            return
        if waited is None:
            self._task = asyncio.get_running_loop().create_task(self._coroutine)
            self._task.add_done_callback(self._task_done)
        else:
            future = cast("asyncio.Future[object]", waited)
            # As a task does: it says that somebody took the future over, so that others may await it as well.
            future._asyncio_future_blocking = False
            future.add_done_callback(self._step)

    def _task_done(self, task: asyncio.Task[Response]) -> None:
        if task.cancelled():
            return
        response = task.result()
        if self._deliver is not None:
            self._deliver(response)
