"""The console's API of databases, and queries forwarded to them."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlencode

import msgspec

from penstock.console.app import Call, json_answer, read_body
from penstock.console.http_poller import Exposition
from penstock.console.overview import backlog_of, feed_position
from penstock.console.sources import MetricsSource, Sources
from penstock.console.topology import state_of, url_of
from penstock.errors import InvalidInput
from penstock.http import Response
from penstock.up import DatabasePlace, PartKind, PartState

QUERY_TIMEOUT_S: Final = 30.0
_LEVELS: Final = ("applied", "flushed", "durable")
_FORM: Final = "application/x-www-form-urlencoded"
_QUERY_MAX: Final = 64 * 1024


class _Query(msgspec.Struct, forbid_unknown_fields=True):
    query: str
    start: float | str | None = None
    end: float | str | None = None
    step: float | str | None = None
    time: float | str | None = None


class _Search(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    vector: list[float]
    k: int = 10
    filter: object = None
    include_fields: list[str] | None = None


_QUERY: Final = msgspec.json.Decoder(_Query)
_SEARCH: Final = msgspec.json.Decoder(_Search)


class DatabasesPanel:
    """Handlers for the databases of the fleet."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    async def index(self, call: Call) -> Response:
        places = self._sources.refresh()
        found = [self._sources.database(place.name) for place in places.databases]
        queues = [
            self._sources.queues[place.queue] for place, _ in found if place.queue in self._sources.queues
        ]
        await asyncio.gather(
            *(source.main.renew(2.0) for _, source in found), *(queue.main.renew(1.0) for queue in queues)
        )
        return json_answer([self._row(place, source) for place, source in found])

    def _row(self, place: DatabasePlace, source: MetricsSource) -> dict[str, object]:
        reading = source.main.reading
        part = self._sources.part(place.part)
        is_up = part is None or part.state is PartState.READY
        value = reading.value if is_up else None
        prefix = f"{place.kind.value}_write_coordinator"
        return {
            "name": place.name,
            "kind": place.kind.value,
            "part": place.part,
            "url": url_of(part),
            "state": None if part is None else state_of(part),
            "error": reading.error or (None if part is None else part.last_error),
            "failing_since_ms": reading.failing_since_ms,
            "watermarks": None if value is None else _watermarks(value, prefix),
            "pending_bytes": _total(value, f"{prefix}_delta_estimated_bytes"),
            "flushes": _total(value, f"{prefix}_flush_total"),
            "feed": self._feed(place, source, value),
        }

    def _feed(
        self, place: DatabasePlace, source: MetricsSource, value: Exposition | None
    ) -> dict[str, object] | None:
        if place.queue is None:
            return None
        queue = self._sources.queues.get(place.queue)
        held = None if queue is None else queue.main.reading.value
        through = None if value is None else feed_position(value)
        reached = {} if through is None else {0: through + 1}
        lag = backlog = None
        if value is not None and queue is not None and held is not None:
            oldest = queue.source.oldest_from(reached)
            lag = 0.0 if oldest is None else max(0.0, (self._sources.clock.now_ms() - oldest) / 1000)
            backlog = backlog_of(held, reached)
        return {
            "queue": place.queue,
            "sequence": through,
            "backlog": backlog,
            "lag_s": lag,
            "records": _total(value, "feed_records"),
            "refused": _total(value, "feed_records_refused"),
            "rate_records_s": None if value is None else source.rate("feed_records"),
        }

    async def query(self, call: Call) -> Response:
        """Forward a PromQL query, and return the database's own response."""
        source = self._of_kind(call, PartKind.TIMESERIES)
        request = read_body(call, _QUERY)
        if not request.query.strip() or len(request.query) > _QUERY_MAX:
            raise InvalidInput(f"query: expected PromQL of at most {_QUERY_MAX} characters")
        is_range = request.start is not None or request.end is not None or request.step is not None
        if is_range and None in (request.start, request.end, request.step):
            raise InvalidInput("a range needs start, end and step")
        names = ("start", "end", "step") if is_range else ("time",)
        form = {name: value for name in names if (value := getattr(request, name)) is not None}
        path = "/api/v1/query_range" if is_range else "/api/v1/query"
        body = urlencode({"query": request.query, **form}).encode()
        return await _passed_on(source, path, body, _FORM)

    async def search(self, call: Call) -> Response:
        """Forward a vector search, and return the database's own response."""
        source = self._of_kind(call, PartKind.VECTOR)
        request = read_body(call, _SEARCH)
        body = msgspec.json.encode(
            {
                "vector": request.vector,
                "k": request.k,
                **({} if request.filter is None else {"filter": request.filter}),
                **({} if request.include_fields is None else {"includeFields": request.include_fields}),
            }
        )
        return await _passed_on(source, "/api/v1/vector/search", body, "application/json")

    def _of_kind(self, call: Call, kind: PartKind) -> MetricsSource:
        self._sources.refresh()
        place, source = self._sources.database(call.name)
        if place.kind is not kind:
            raise InvalidInput(
                f"{place.name} is a {place.kind.value} database; this query needs a {kind.value} database"
            )
        return source


async def _passed_on(source: MetricsSource, path: str, body: bytes, kind: str) -> Response:
    status, answer, _ = await source.http.pass_on(path, body=body, kind=kind, timeout_s=QUERY_TIMEOUT_S)
    return Response(status, answer, headers=[(b"cache-control", b"no-store")])


def _watermarks(metrics: Exposition, prefix: str) -> dict[str, int | None]:
    return {level: _total(metrics, f"{prefix}_watermark", level=level) for level in _LEVELS}


def _total(metrics: Exposition | None, name: str, **labels: str) -> int | None:
    value = None if metrics is None else metrics.total(name, **labels)
    return None if value is None else int(value)
