"""The endpoints of queues: claim, ack, nack, extend, and the work stream."""

from __future__ import annotations

from typing import Final

from penstock.clock import Clock
from penstock.http import Call, Cap, Keyring, Response, Route, Routes, Scope
from penstock.servers.caps import StreamLimiter
from penstock.servers.topics import queue_answers, queue_bodies
from penstock.servers.topics.seam import TopicsEngine
from penstock.servers.topics.sse import HEADERS
from penstock.servers.topics.watch import check_accepts_events
from penstock.servers.topics.work_feed import WorkFeed

__all__ = ["QueueApi"]

_QUEUE: Final = b"/v0/topics/{name}"
_EVENTS: Final = b"text/event-stream"


class QueueApi:
    """The handlers, over one engine. `drain` ends every work stream; its jobs go back into the queue."""

    def __init__(self, engine: TopicsEngine, clock: Clock, caps: StreamLimiter) -> None:
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
        # A stream has caps of its own.
        yield (
            b"GET",
            _QUEUE + b"/work",
            Route(handler=self.work, scope=both, auth=keys.authenticate_with_token),
        )

    def drain(self) -> None:
        """Tell every worker that the server leaves."""
        for feed in list(self._feeds):
            feed.shut_down()

    async def claim(self, call: Call) -> Response:
        body = queue_bodies.read_claim(call.request)
        result = await self._engine.claim(call.name, body.node, max=body.max, lease_ms=body.lease_ms)
        return queue_answers.claim_answer(call.request, result)

    async def ack(self, call: Call) -> Response:
        body = queue_bodies.read_ack(call.request)
        result = await self._engine.ack(call.name, body.node, body.seqs, body.lease_ids)
        return queue_answers.ack_answer(call.request, result)

    async def nack(self, call: Call) -> Response:
        body = queue_bodies.read_nack(call.request)
        result = await self._engine.nack(
            call.name, body.node, body.seqs, body.lease_ids, delay_ms=body.delay_ms
        )
        return queue_answers.nack_answer(call.request, result)

    async def extend(self, call: Call) -> Response:
        body = queue_bodies.read_extend(call.request)
        result = await self._engine.extend(
            call.name, body.node, body.seqs, body.lease_ids, lease_ms=body.lease_ms
        )
        return queue_answers.extend_answer(call.request, result)

    async def work(self, call: Call) -> Response:
        """The stream begins when its response does; until then nothing is held."""
        check_accepts_events(call.request.headers.get(b"accept"))
        query = queue_bodies.read_work(call.request.query())
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
