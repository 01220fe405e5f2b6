"""The handlers of `/v0`: each reads its request, calls the engine, and encodes the response."""

from __future__ import annotations

import asyncio
from typing import Final

import penstock
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.http import (
    App,
    Call,
    Cap,
    Deliver,
    Keyring,
    MethodNotAllowed,
    Policy,
    Request,
    Response,
    Route,
    Routes,
    Scope,
    UnknownPath,
    no_key,
)
from penstock.servers.errors import response_to
from penstock.servers.limits import RequestLimiter, StreamLimiter, StreamLimits
from penstock.servers.topics import answers, bodies, metrics
from penstock.servers.topics.answers import damaged_in, read_cursor
from penstock.servers.topics.broadcaster import Broadcaster
from penstock.servers.topics.queues import QueueApi
from penstock.servers.topics.routers import RouterApi
from penstock.servers.topics.watch import WatchApi
from penstock.servers.topics.websocket import WebSocketApi
from penstock.topics import (
    PAGE_SIZE_DEFAULT,
    PAGE_SIZE_MAX,
    Damaged,
    Engine,
    NotReady,
    Page,
    ShuttingDown,
    WriteResult,
    names_in,
    parse_match,
)

_TOPIC: Final = b"/v0/topics/{name}"


class TopicsApi:
    """The handlers of the topics API. `drain` ends every long poll with the records available."""

    def __init__(
        self, engine: Engine, *, clock: Clock = SYSTEM_CLOCK, streams: StreamLimits | None = None
    ) -> None:
        self._engine = engine
        self.live = LiveApi(engine, clock, streams)
        self.queues = QueueApi(engine, clock, self.live.caps)
        self.routers = RouterApi(engine)
        self._clock = clock
        self._started_s = clock.monotonic()
        self._polls: set[asyncio.Task[object]] = set()
        self._is_draining = False

    def check_ready(self) -> None:
        """Raise `NotReady` while the log is replayed, and `ShuttingDown` after `drain`."""
        if self._is_draining:
            raise ShuttingDown("the server is shutting down; nothing was applied")
        if not self._engine.ready:
            progress = round(self._engine.replay_progress, 4)
            raise NotReady("the log is being replayed", {"replay_progress": progress})

    def drain(self) -> None:
        """Refuse new requests, end every long poll and every stream."""
        self._is_draining = True
        self.live.drain()
        self.queues.drain()
        for poll in self._polls:
            poll.cancel()

    @property
    def uptime_ms(self) -> int:
        return int((self._clock.monotonic() - self._started_s) * 1000)

    # --- topics --------------------------------------------------------------------------------------------

    async def put_topic(self, call: Call) -> Response:
        config = bodies.read_config(call.request)
        call.principal.require_names(names_in(config))
        return answers.put_answer(call.request, await self._engine.put_topic(call.name, config))

    async def get_topic(self, call: Call) -> Response:
        touch = bodies.query_flag(call.request.query(), "touch", True)
        await self._engine.drain(call.name)
        return answers.state_answer(call.request, self._engine.state(call.name, touch=touch))

    async def list_topics(self, call: Call) -> Response:
        query = call.request.query()
        size = bodies.query_number(query, "page_size", PAGE_SIZE_DEFAULT)
        states, after = self._engine.topics(
            prefix=query.get("prefix", ""),
            after=read_cursor(query.get("cursor", "")),
            limit=min(max(size, 1), PAGE_SIZE_MAX),
            touch=bodies.query_flag(query, "touch", False),
            allowed=call.principal.name_filter,
        )
        return answers.list_answer(call.request, states, after)

    async def remove_topic(self, call: Call) -> Response:
        if_empty = bodies.query_flag(call.request.query(), "if_empty", False)
        result = await self._engine.remove_topic(call.name, if_empty=if_empty)
        return answers.remove_answer(call.request, result)

    # --- records -------------------------------------------------------------------------------------------

    def write(self, call: Call, deliver: Deliver) -> None:
        """Append the records; the commit's callback delivers the response."""
        request = call.request
        body = bodies.read_write(request)
        create, config = body.create, body.config
        if config is not None:
            call.principal.require_names(names_in(body))
            if Scope.ADMIN not in call.principal.scopes:
                if not self._engine.exists(call.name):
                    call.principal.require(Scope.ADMIN)
                # If the topic is deleted before the records are appended, this key may recreate it, but not
                # configure it.
                create, config = config.auto_create if create is None else create, None
        return_seqs = not request.query_text or bodies.query_flag(request.query(), "return_seqs", True)

        def written(outcome: WriteResult | Exception) -> None:
            if isinstance(outcome, WriteResult):
                deliver(answers.write_answer(request, outcome, return_seqs=return_seqs))
            else:
                deliver(response_to(outcome))

        self._engine.append(
            call.name,
            body.records,
            written,
            node=body.node,
            idempotency_key=body.idempotency_key,
            create=create,
            config=config,
            parsed=True,
            insist=body.disable_backpressure,
        )

    async def diff(self, call: Call) -> Response:
        body = bodies.read_diff(call.request)
        try:
            if body.wait_ms:
                page = await self._poll(call.name, body)
            else:
                page = await self._page(call.name, body, 0)
        except Damaged as error:
            raise damaged_in(call.name, error) from error
        return answers.page_answer(call.request, page)

    async def _page(self, name: str, body: bodies.DiffBody, wait_ms: int) -> Page:
        return await self._engine.diff(
            name,
            body.from_seq,
            limit=body.limit,
            node=body.nodes,
            include_tags=body.include_tags,
            include_meta=body.include_meta,
            wait_ms=wait_ms,
            max_batch_bytes=body.max_batch_bytes,
            match=None if body.match is None else parse_match(body.match),
        )

    async def _poll(self, name: str, body: bodies.DiffBody) -> Page:
        await asyncio.sleep(0)  # runs as a task from here on, so that it ends when the client leaves
        task = asyncio.current_task()
        assert task is not None
        self._polls.add(task)
        try:
            return await self._page(name, body, 0 if self._is_draining else body.wait_ms)
        except asyncio.CancelledError:
            if not self._is_draining:
                raise
            task.uncancel()
            return await self._page(name, body, 0)
        finally:
            self._polls.discard(task)

    async def delete(self, call: Call) -> Response:
        body = bodies.read_delete(call.request)
        match = None if body.match is None else parse_match(body.match)
        try:
            result = await self._engine.delete(call.name, before_seq=body.before_seq, match=match)
        except Damaged as error:
            raise damaged_in(call.name, error) from error
        return answers.delete_answer(call.request, result)

    # --- operations ----------------------------------------------------------------------------------------

    async def health(self, call: Call) -> Response:
        return metrics.health_answer(penstock.__version__, self.uptime_ms)

    async def ready(self, call: Call) -> Response:
        self.check_ready()
        await self._engine.check_writable()
        return metrics.ready_answer(self._engine.topic_count)

    async def metrics(self, call: Call) -> Response:
        as_json = b"application/json" in call.request.headers.get(b"accept", b"")
        return metrics.metrics_answer(
            self._engine,
            self.uptime_ms,
            as_json=as_json,
            allowed=call.principal.name_filter,
            connections=self.live.connections,
            sessions=self.live.sessions,
            waiting=self.live.waiting,
        )


def topics_app(
    api: TopicsApi, keys: Keyring, *, in_flight_per_key_max: int = 1000, probes_need_key: bool = False
) -> App[Call]:
    """Return the `/v0` API as an application for a listener."""
    policy = Policy(call=Call, authenticate=keys.authenticate, check_ready=api.check_ready, missed=_missed)
    routes = _routes(api, keys, RequestLimiter(in_flight_per_key_max), probes_need_key=probes_need_key)
    return App(routes, policy, response_to)


def _routes(api: TopicsApi, keys: Keyring, cap: Cap, *, probes_need_key: bool) -> Routes[Call]:
    yield b"PUT", _TOPIC, Route(handler=api.put_topic, scope=Scope.ADMIN, cap=cap)
    yield b"GET", _TOPIC, Route(handler=api.get_topic, scope=Scope.READ, cap=cap)
    yield b"GET", b"/v0/topics", Route(handler=api.list_topics, scope=Scope.READ, cap=cap)
    yield b"DELETE", _TOPIC, Route(handler=api.remove_topic, scope=Scope.DELETE, cap=cap)
    yield b"POST", _TOPIC, Route(callback=api.write, scope=Scope.WRITE, cap=cap)
    yield b"POST", _TOPIC + b"/diff", Route(handler=api.diff, scope=Scope.READ, cap=cap)
    yield b"POST", _TOPIC + b"/delete", Route(handler=api.delete, scope=Scope.DELETE, cap=cap)
    yield from api.queues.routes(keys, cap)
    yield from api.routers.routes(cap)
    yield from api.live.routes(keys, cap)
    # For operators: available before the engine is ready, and never counted as in progress.
    yield b"GET", b"/v0/metrics", Route(handler=api.metrics, scope=Scope.READ, ready=False)
    probe_auth = None if probes_need_key else no_key
    for path in (b"/v0/health", b"/healthz"):
        yield b"GET", path, Route(handler=api.health, scope=Scope.NONE, auth=probe_auth, ready=False)
    for path in (b"/v0/ready", b"/readyz"):
        yield b"GET", path, Route(handler=api.ready, scope=Scope.NONE, auth=probe_auth, ready=False)


def _missed(request: Request, allowed: bytes | None) -> Exception:
    if allowed is not None:
        method = request.method.decode("ascii", "replace")
        return MethodNotAllowed(
            f"{method} is not allowed here; use {allowed.decode()}", headers=[(b"allow", allowed)]
        )
    if request.method == b"OPTIONS":
        return MethodNotAllowed("OPTIONS is not supported", headers=[(b"allow", b"GET, PUT, POST, DELETE")])
    return UnknownPath("nothing is at this path")


class LiveApi:
    """Streams and WebSockets, with one broadcaster and one limiter. `drain` ends them."""

    def __init__(self, engine: Engine, clock: Clock, limits: StreamLimits | None = None) -> None:
        limits = StreamLimits() if limits is None else limits
        self.broadcaster = Broadcaster(clock, engine.scheduler, beat_ms_min=limits.heartbeat_ms_min)
        self.caps = StreamLimiter(limits)
        self._watch = WatchApi(engine, self.broadcaster, self.caps, limits, clock)
        self._socket = WebSocketApi(engine, self.broadcaster, self.caps)

    @property
    def connections(self) -> int:
        """The number of open streams and WebSockets."""
        return self.caps.total

    @property
    def sessions(self) -> int:
        """The number of watch sessions, with or without an open stream."""
        return len(self._watch.sessions)

    @property
    def waiting(self) -> int:
        """The number of topics with records to deliver."""
        return self.broadcaster.waiting

    def routes(self, keys: Keyring, cap: Cap) -> Routes[Call]:
        self._watch.keys = keys
        yield b"POST", b"/v0/watch", Route(handler=self._watch.create, scope=Scope.READ, cap=cap)
        # Streams have separate limits. A watch checks the key last.
        yield b"GET", b"/v0/watch/{name}", Route(handler=self._watch.open, scope=Scope.NONE, auth=no_key)
        yield b"GET", b"/v0/ws", Route(handler=self._socket.open, scope=Scope.NONE)

    def drain(self) -> None:
        """Report the shutdown to every client."""
        self.broadcaster.shut_down()
