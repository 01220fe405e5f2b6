"""Routes of the vector API, and of operations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.coordinator import Durability, FlushError, Shutdown
from penstock.errors import Corrupt, Fenced, NotFound, Rejected, Unavailable
from penstock.http import Call as HttpCall
from penstock.http import (
    Fault,
    HeaderList,
    PayloadTooLarge,
    Refusal,
    Request,
    Response,
    Route,
    Routes,
    Scope,
    TransportFault,
    UnsupportedMediaType,
    body_limit,
    no_key,
)
from penstock.metrics import Registry
from penstock.servers.database import (
    RETRY,
    DatabaseApi,
    DatabaseApp,
    DecodedBytes,
    Source,
    check_writable,
    serve_database,
)
from penstock.servers.errors import STATUS, told
from penstock.servers.vector.settings import VectorSettings
from penstock.vector import (
    VectorConfig,
    VectorStore,
    Write,
    decoded_size,
    deleted_answer,
    error_answer,
    parse_delete,
    parse_recall,
    parse_search,
    parse_write,
    recall_answer,
    search_answer,
    search_bytes_max,
    upserted_answer,
    vector_answer,
)

_LOG = logging.getLogger(__name__)

PROTOBUF_JSON: Final = b"application/protobuf+json"
JSON: Final = b"application/json"
_FAULTS: Final = {Fault.MALFORMED: 400, Fault.TOO_LARGE: 413, Fault.FORBIDDEN: 403}


class Call(HttpCall):
    """One admitted request."""

    __slots__ = ()

    def answer(self, status: int, body: bytes, headers: HeaderList = ()) -> Response:
        """Return a response in the client's content type: plain JSON if it sends or accepts that."""
        return Response(status, body, content_type=_content_type_of(self.request), headers=headers)


def _content_type_of(request: Request) -> bytes:
    types = request.headers.get(b"content-type", b"") + b"," + request.headers.get(b"accept", b"")
    return JSON if JSON in types.lower() else PROTOBUF_JSON


def response_to(error: Exception, request: Request | None) -> Response:
    """Return the response for an error."""
    content_type = PROTOBUF_JSON if request is None else _content_type_of(request)
    if isinstance(error, TransportFault):
        return _error(_FAULTS.get(error.fault, 503), str(error), content_type)
    if isinstance(error, Refusal):
        return _error(STATUS[error.code], str(error), content_type, error.headers)
    if isinstance(error, Unavailable | Shutdown | Fenced):
        # Not the sender's fault, and the next server will accept it: senders retry after a 503.
        return _error(503, told(error), content_type)
    if isinstance(error, NotFound):
        return _error(404, told(error), content_type)
    if isinstance(error, Rejected):
        return _error(400, told(error), content_type)
    _LOG.error("a request failed", exc_info=error)
    message = told(error) if isinstance(error, FlushError | Corrupt) else "the server failed; see its log"
    return _error(500, message, content_type)


def _error(status: int, message: str, content_type: bytes, headers: HeaderList = ()) -> Response:
    all_headers = [*headers, RETRY] if status in (429, 503) else headers
    return Response(status, error_answer(message), content_type=content_type, headers=all_headers)


T = TypeVar("T")

_TEXT: Final = b"text/plain; version=0.0.4; charset=utf-8"
_TAKEN: Final = (PROTOBUF_JSON, JSON)
_INLINE_BYTES: Final = 64 * 1024
"""Below this size, decoding a body directly is cheaper than using a thread."""
_INLINE_HITS: Final = 100
"""Above this many hits, a thread encodes the response."""
_ROOT: Final = b"/api/v1/vector"


class VectorApi(DatabaseApi[VectorStore]):
    """The handlers. `database` is None until the collection is open."""

    def __init__(self, settings: VectorSettings, *, clock: Clock, registry: Registry) -> None:
        super().__init__("collection")
        self._settings = settings
        self._clock = clock
        self._registry = registry
        self._searches = registry.histogram("vector.search_duration_seconds", "Time to serve a search.")
        self._upserted = registry.counter("vector.vectors_upserted", "Vectors upserted by requests.")
        self._deleted = registry.counter("vector.vectors_deleted", "Ids deleted by requests.")
        self._decoded = DecodedBytes(
            settings.decoded_bytes_max,
            registry.gauge("vector.decoded_bytes", "Memory taken by decoded bodies of requests in progress."),
        )
        self._held = registry.gauge("vector.vectors", "Vectors in the collection, as of the last flush.")

    async def write(self, call: Call) -> Response:
        count = await self._apply(call, parse_write)
        self._upserted.inc(count)
        return call.answer(200, upserted_answer(count))

    async def delete(self, call: Call) -> Response:
        count = await self._apply(call, parse_delete)
        self._deleted.inc(count)
        return call.answer(200, deleted_answer(count))

    async def _apply(self, call: Call, parse: Callable[[bytes], Write]) -> int:
        """Apply a write, wait for the configured acknowledgement, and return its number of entries.

        Raise `Unavailable` after the timeout.
        """
        holding = contextlib.AsyncExitStack()
        async with holding:
            write = await holding.enter_async_context(self._decode(call, parse))
            store, level = self._db, self._settings.level
            async with self._in_time(level):
                await store.write(write, timeout=self._settings.write_timeout_s)
                await holding.aclose()  # the delta owns the decoded entries now
                if level > Durability.APPLIED:
                    await store.flush(durable=level is Durability.DURABLE)
        return len(write.entries)

    @contextlib.asynccontextmanager
    async def _decode(self, call: Call, parse: Callable[[bytes], T]) -> AsyncIterator[T]:
        """Decode the body; count it until the context ends. Raise `Unavailable` if it does not fit."""
        _check_type(call)
        body = call.request.body
        with self._decoded.holding(len(body)) as held:
            inline = len(body) <= _INLINE_BYTES
            size = decoded_size(body) if inline else await asyncio.to_thread(decoded_size, body)
            if size > self._settings.decoded_bytes_max:
                raise PayloadTooLarge(
                    f"the body would take about {size:,} bytes in memory, and there is room for "
                    f"{self._settings.decoded_bytes_max:,} over all requests: send fewer at a time"
                )
            held.grow_to(size)
            yield parse(body) if inline else await asyncio.to_thread(parse, body)

    @contextlib.asynccontextmanager
    async def _in_time(self, level: Durability) -> AsyncIterator[None]:
        """Raise `Unavailable` after the timeout, so that a stalled storage does not block requests."""
        seconds = self._settings.acknowledge_timeout_s
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Unavailable(
                f"not {level.name.lower()} within {seconds:g} s: the outcome is unknown. Send it again: a "
                "write that is stored twice has the same effect as one stored once"
            ) from None

    async def search(self, call: Call) -> Response:
        began = self._clock.monotonic()
        async with self._decode(call, parse_search) as query:
            hits = await self._db.search(
                query.vector,
                query.k,
                filter=query.filter,
                include_fields=query.include_fields,
                nprobe=query.nprobe,
            )
        self._searches.observe(self._clock.monotonic() - began)
        if len(hits) <= _INLINE_HITS:
            return call.answer(200, search_answer(hits))
        return call.answer(200, await asyncio.to_thread(search_answer, hits))

    def search_bytes_max(self) -> int:
        """Return the maximum body size of a search in this collection."""
        return search_bytes_max(self._db.collection.dimensions)

    async def recall(self, call: Call) -> Response:
        query = parse_recall(call.request.query())
        measured = await self._db.recall(sample=query.sample, k=query.k, nprobe=query.nprobe)
        return call.answer(200, recall_answer(measured))

    async def get(self, call: Call) -> Response:
        vector = await self._db.get(call.name)
        if vector is None:
            raise NotFound(f"there is no vector {call.name!r}")
        return call.answer(200, vector_answer(vector))

    async def flush(self, call: Call) -> Response:
        async with self._in_time(Durability.DURABLE):
            await self._db.flush()
        return call.answer(200, b'{"status":"success"}')

    async def healthy(self, call: Call) -> Response:
        """Report whether the process works. If the collection has stopped, the process must be restarted."""
        self.check_failed()
        return call.answer(200, b'{"status":"healthy"}')

    async def ready(self, call: Call) -> Response:
        check_writable(self._db)
        return call.answer(200, b'{"status":"ready"}')

    async def metrics(self, call: Call) -> Response:
        if self.database is not None:
            self._held.set(len(self.database))
        return Response(200, self._registry.prometheus_text().encode(), content_type=_TEXT)


def vector_app(api: VectorApi, settings: VectorSettings) -> DatabaseApp[Call]:
    """Return the application that serves `api`."""
    return DatabaseApp(
        _routes(api),
        settings.keys,
        call=Call,
        check_ready=api.check_ready,
        requests_max=settings.requests_max,
        errors=response_to,
    )


def _routes(api: VectorApi) -> Routes[Call]:
    read, search_limit = Scope.READ, body_limit(api.search_bytes_max)
    yield b"POST", _ROOT + b"/write", Route(handler=api.write, scope=Scope.WRITE)
    yield b"POST", _ROOT + b"/delete", Route(handler=api.delete, scope=Scope.DELETE)
    yield b"POST", _ROOT + b"/search", Route(handler=api.search, scope=read, check=search_limit)
    yield b"GET", _ROOT + b"/vectors/{id}", Route(handler=api.get, scope=read)
    yield b"GET", _ROOT + b"/recall", Route(handler=api.recall, scope=read)
    yield b"POST", b"/-/flush", Route(handler=api.flush, scope=Scope.ADMIN)
    yield b"GET", b"/metrics", Route(handler=api.metrics, scope=read, ready=False)
    yield b"GET", b"/-/healthy", Route(handler=api.healthy, scope=Scope.NONE, auth=no_key, ready=False)
    yield b"GET", b"/-/ready", Route(handler=api.ready, scope=Scope.NONE, auth=no_key, ready=False)


def _check_type(call: Call) -> None:
    """Raise `UnsupportedMediaType` unless the body is declared as JSON, or not declared."""
    kind = call.request.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind and kind not in _TAKEN:
        raise UnsupportedMediaType("send the body as application/protobuf+json or application/json")


async def serve_vector(
    config: VectorConfig,
    settings: VectorSettings,
    stop: asyncio.Event,
    *,
    source: Callable[[VectorStore, Registry], Source] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    on_bound: Callable[[str, int], None] | None = None,
    on_ready: Callable[[VectorStore], None] | None = None,
) -> None:
    """Serve the collection until `stop` is set; see `serve_database`."""
    registry = Registry()
    api = VectorApi(settings, clock=clock, registry=registry)
    await serve_database(
        vector_app(api, settings),
        api,
        settings,
        stop,
        opening=lambda: VectorStore.open(config, clock=clock, registry=registry),
        sync_mode=config.sync_mode,
        source=None if source is None else lambda store: source(store, registry),
        clock=clock,
        on_bound=on_bound,
        on_ready=on_ready,
    )
