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
    """One client, as its listener sees it."""

    def tick(self) -> None:
        """Close connections that take too long; called every second."""
        ...

    def drain(self) -> None:
        """Close as soon as nothing is under way; answers from now on are the last of their connection."""
        ...

    def abort(self) -> None:
        """Close now."""
        ...


class Host:
    """The application, the limits, and every connection that is open."""

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
        """The `Date` header, made once a second and not once a response."""
        self.date = formatdate(self.clock.now_ms() / 1000, usegmt=True).encode()

    def chunk(self, data: bytes) -> bytes:
        """The bytes as a chunk of a chunked body; made once when the same piece goes to many clients."""
        if data is not self._chunk_data:
            self._chunk_data, self._chunk = data, b"%x\r\n%b\r\n" % (len(data), data)
        return self._chunk

    @property
    def is_full(self) -> bool:
        return len(self.connections) >= self.limits.connections_max


class RequestTask:
    """One request on its way to its response.

    Most requests either finish at once or wait for a single future, the commit. A task each would cost more
    than the parsing, so a coroutine is driven by the futures it waits for. When it yields without a future
    (`asyncio.sleep(0)`) the rest becomes a task, which `abandon` cancels; otherwise it runs to its end.
    """

    __slots__ = ("_coroutine", "_deliver", "_task")

    def __init__(self, deliver: Callable[[Response], None]) -> None:
        self._coroutine: Coroutine[object, None, Response] | None = None
        self._deliver: Callable[[Response], None] | None = deliver
        self._task: asyncio.Task[Response] | None = None

    def start(self, app: Application, request: Request) -> None:
        """Have the request answered; `deliver` may be called before this returns."""
        coroutine = app.begin(request, self._land)
        if coroutine is not None:
            self.run(coroutine)

    def run(self, coroutine: Coroutine[object, None, Response]) -> None:
        """Drive a coroutine to the response."""
        self._coroutine = coroutine
        self._step(None)

    @property
    def is_patient(self) -> bool:
        """Whether it waits in its own task, and may therefore wait long."""
        return self._task is not None

    def abandon(self) -> None:
        """Drop the response: no client waits for it any more."""
        self._deliver = None
        if self._task is not None:
            self._task.cancel()

    def _land(self, response: Response) -> None:
        if self._deliver is not None:
            self._deliver(response)

    def _step(self, _: object) -> None:
        coroutine = self._coroutine
        assert coroutine is not None
        try:
            waited = coroutine.send(None)
        except StopIteration as done:
            self._land(done.value)
            return
        if waited is None:
            self._task = asyncio.get_running_loop().create_task(coroutine)
            self._task.add_done_callback(self._task_done)
        else:
            future = cast("asyncio.Future[object]", waited)
            # As a task does: the future is taken over, so that others may await it as well.
            future._asyncio_future_blocking = False
            future.add_done_callback(self._step)

    def _task_done(self, task: asyncio.Task[Response]) -> None:
        if not task.cancelled():
            self._land(task.result())
