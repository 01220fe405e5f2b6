"""Queues: claim, ack, nack, extend, and the work stream."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.http import Call, Cap, Keyring, Response, Route, Routes, Scope, StreamWriter
from penstock.servers.errors import told
from penstock.servers.limits import StreamLimiter
from penstock.servers.topics import answers, bodies
from penstock.servers.topics.sse import HEADERS, RETRY, check_accepts_events, event
from penstock.topics import ClaimResult, Engine, ShuttingDown, TopicNotFound, WorkStream

_LOG = logging.getLogger(__name__)
_HEARTBEAT_S: Final = 15.0
_ENCODE: Final = msgspec.json.Encoder().encode
_GONE: Final = "the queue was deleted"
_SILENT: Final = "leases expired and the worker was silent; reconnect when it is available again"
_BROKEN: Final = "the stream failed; see the server's log; reconnect"
_LEAVING: Final = "the server is shutting down; reconnect"


class WorkFeed:
    """The body of a work stream. One task claims jobs, so a client that does not read claims none."""

    def __init__(self, work: WorkStream, topic: str, clock: Clock) -> None:
        self._work = work
        self._topic = topic
        self._clock = clock
        self._writer: StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._emptied: asyncio.Event = asyncio.Event()
        self.on_opened: Callable[[WorkFeed], None] = lambda _: None
        self.on_closed: Callable[[WorkFeed], None] = lambda _: None

    def attach(self, writer: StreamWriter) -> None:
        self._writer = writer
        self.on_opened(self)
        writer.write(RETRY)
        self._task = asyncio.get_running_loop().create_task(self._run(writer))

    def writable(self) -> None:
        self._emptied.set()

    def closed(self) -> None:
        """Return the jobs of a client that has left, even while a claim for it is in progress."""
        if self._writer is None:
            return
        self._writer = None
        self.on_closed(self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def shut_down(self) -> None:
        """Report the shutdown and end the stream."""
        self._end("server_shutting_down", _LEAVING)

    def _end(self, code: object, error: str) -> None:
        if self._writer is not None:
            data = _ENCODE({"code": code, "error": error, "topic": self._topic})
            self._writer.write(event(b"error", data))
            self._writer.end()
            self.closed()

    async def _run(self, writer: StreamWriter) -> None:
        try:
            while True:
                await self._wait_for_client(writer)
                jobs = await self._work.next(_HEARTBEAT_S)
                if self._work.is_silent:
                    self._end(408, _SILENT)
                    return
                writer.write(b": hb %d\n\n" % self._clock.now_ms() if jobs is None else self._frames(jobs))
        except TopicNotFound:
            self._end(409, _GONE)
        except ShuttingDown:
            self.shut_down()
        except PenstockError as error:
            self._end(503, told(error))
        except Exception:  # noqa: BLE001 - a client must not wait on a stream that has failed
            _LOG.exception('the work stream of "%s" failed; its jobs are returned to the queue', self._topic)
            self._end(500, _BROKEN)
        finally:
            with contextlib.suppress(PenstockError):
                await self._work.close()

    async def _wait_for_client(self, writer: StreamWriter) -> None:
        while not writer.is_writable:
            self._emptied.clear()
            await self._emptied.wait()

    def _frames(self, jobs: ClaimResult) -> bytes:
        lead = b'{"topic":%b,' % _ENCODE(self._topic)
        return b"".join(
            [
                event(b"job", lead + fragment[1:], b"%d" % seq)
                for seq, fragment in zip(jobs.seqs, jobs.fragments, strict=True)
            ]
        )


_QUEUE: Final = b"/v0/topics/{name}"
_EVENTS: Final = b"text/event-stream"


class QueueApi:
    """The handlers of queues. `drain` ends every work stream and returns its jobs to the queue."""

    def __init__(self, engine: Engine, clock: Clock, caps: StreamLimiter) -> None:
        self._engine = engine
        self._clock = clock
        self._caps = caps
        self._feeds: set[WorkFeed] = set()

    def routes(self, keys: Keyring, cap: Cap) -> Routes[Call]:
        both = Scope.READ | Scope.WRITE
        yield b"POST", _QUEUE + b"/claim", Route(handler=self.claim, scope=both, cap=cap)
        yield b"POST", _QUEUE + b"/ack", Route(handler=self.ack, scope=Scope.WRITE, cap=cap)
        yield b"POST", _QUEUE + b"/nack", Route(handler=self.nack, scope=Scope.WRITE, cap=cap)
        yield b"POST", _QUEUE + b"/extend", Route(handler=self.extend, scope=Scope.WRITE, cap=cap)
        # Streams have separate limits.
        yield (
            b"GET",
            _QUEUE + b"/work",
            Route(handler=self.work, scope=both, auth=keys.authenticate_with_token),
        )

    def drain(self) -> None:
        """Report the shutdown to every worker."""
        for feed in list(self._feeds):
            feed.shut_down()

    async def claim(self, call: Call) -> Response:
        body = bodies.read_claim(call.request)
        result = await self._engine.claim(call.name, body.node, max=body.max, lease_ms=body.lease_ms)
        return answers.claim_answer(call.request, result)

    async def ack(self, call: Call) -> Response:
        body = bodies.read_ack(call.request)
        result = await self._engine.ack(call.name, body.node, body.seqs, body.lease_ids)
        return answers.ack_answer(call.request, result)

    async def nack(self, call: Call) -> Response:
        body = bodies.read_nack(call.request)
        result = await self._engine.nack(
            call.name, body.node, body.seqs, body.lease_ids, delay_ms=body.delay_ms
        )
        return answers.nack_answer(call.request, result)

    async def extend(self, call: Call) -> Response:
        body = bodies.read_extend(call.request)
        result = await self._engine.extend(
            call.name, body.node, body.seqs, body.lease_ids, lease_ms=body.lease_ms
        )
        return answers.extend_answer(call.request, result)

    async def work(self, call: Call) -> Response:
        """Open a work stream. No job is claimed before the response starts."""
        check_accepts_events(call.request.headers.get(b"accept"))
        query = bodies.read_work(call.request.query())
        work = await self._engine.work(call.name, query.node, max=query.max, lease_ms=query.lease_ms)
        principal = call.principal
        self._caps.check(principal)
        feed = WorkFeed(work, call.name, self._clock)

        def opened(feed: WorkFeed) -> None:
            self._caps.enter(principal)
            self._feeds.add(feed)

        def closed(feed: WorkFeed) -> None:
            self._feeds.discard(feed)
            self._caps.leave(principal)

        feed.on_opened, feed.on_closed = opened, closed
        return Response(200, content_type=_EVENTS, headers=HEADERS, live=feed)
