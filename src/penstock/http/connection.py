"""State that all connections share, and the task that drives a request to its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import Protocol, cast

from penstock.clock import Clock
from penstock.http.h1_heads import KnownHeads
from penstock.http.limits import ByteBudget, HttpLimits
from penstock.http.message import Application, Request, Response


class Connection(Protocol):
    """One client, as seen by its listener."""

    def tick(self) -> None:
        """Close the connection if it exceeds a timeout. Called every second."""
        ...

    def drain(self) -> None:
        """Close as soon as no request is in progress. Pending responses are the last ones."""
        ...

    def abort(self) -> None:
        """Close immediately."""
        ...


class Host:
    """The application, the limits, and all open connections."""

    __slots__ = (
        "_chunk",
        "_chunk_data",
        "app",
        "budget",
        "clock",
        "connections",
        "date",
        "draining",
        "heads",
        "limits",
        "loop",
    )

    def __init__(
        self, app: Application, limits: HttpLimits, clock: Clock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.app = app
        self.limits = limits
        self.clock = clock
        self.loop = loop
        self.budget = ByteBudget(limits.held_bytes_max)
        self.connections: set[Connection] = set()
        self.draining = False
        self.heads = KnownHeads()
        self.date = b""
        self._chunk_data = self._chunk = b""
        self.set_date()

    def set_date(self) -> None:
        """Update the `Date` header; called once a second instead of for each response."""
        self.date = formatdate(self.clock.now_ms() / 1000, usegmt=True).encode()

    def chunk(self, data: bytes) -> bytes:
        """Encode `data` as a chunk of a chunked body; reuse the last chunk if many clients get it."""
        if data is not self._chunk_data:
            self._chunk_data, self._chunk = data, b"%x\r\n%b\r\n" % (len(data), data)
        return self._chunk

    @property
    def is_full(self) -> bool:
        return len(self.connections) >= self.limits.connections_max


class RequestTask:
    """One request until its response.

    Most requests finish immediately or wait for one future, their commit. A task for each would cost more
    than the parsing, so the futures that a coroutine waits for drive it. If it yields without a future
    (`asyncio.sleep(0)`), the rest becomes a task, which `abandon` cancels. Otherwise it runs to completion.
    """

    __slots__ = ("_coroutine", "_deliver", "_task")

    def __init__(self, deliver: Callable[[Response], None]) -> None:
        self._coroutine: Coroutine[object, None, Response] | None = None
        self._deliver: Callable[[Response], None] | None = deliver
        self._task: asyncio.Task[Response] | None = None

    def start(self, app: Application, request: Request) -> None:
        """Start the request. `deliver` may be called before this returns."""
        coroutine = app.begin(request, self._respond)
        if coroutine is not None:
            self.run(coroutine)

    def run(self, coroutine: Coroutine[object, None, Response]) -> None:
        """Drive a coroutine until it returns the response."""
        self._coroutine = coroutine
        self._step(None)

    @property
    def is_patient(self) -> bool:
        """Whether the request runs in its own task, and may therefore wait for long."""
        return self._task is not None

    def abandon(self) -> None:
        """Drop the response: the client has left."""
        self._deliver = None
        if self._task is not None:
            self._task.cancel()

    def _respond(self, response: Response) -> None:
        if self._deliver is not None:
            self._deliver(response)

    def _step(self, _: object) -> None:
        coroutine = self._coroutine
        assert coroutine is not None
        try:
            waited = coroutine.send(None)
        except StopIteration as done:
            self._respond(done.value)
            return
        if waited is None:
            self._task = asyncio.get_running_loop().create_task(coroutine)
            self._task.add_done_callback(self._task_done)
        else:
            future = cast("asyncio.Future[object]", waited)
            # As a task does: reset the flag, so that others may also await this future.
            future._asyncio_future_blocking = False
            future.add_done_callback(self._step)

    def _task_done(self, task: asyncio.Task[Response]) -> None:
        if not task.cancelled():
            self._respond(task.result())
