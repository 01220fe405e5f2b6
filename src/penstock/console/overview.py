"""The overview: the parts, the data flow with its figures, and the balance of the pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import penstock
from penstock.console.http_poller import Exposition
from penstock.console.poller import Reading
from penstock.console.queues import QueueReading
from penstock.console.sources import LINES_SHOWN, PipelineSource, QueueWatch, Sources
from penstock.console.topics_source import TopicsReading
from penstock.console.topology import EdgeKey, Figures, state_of, topology_of, url_of
from penstock.findings import problems_in
from penstock.up import DatabasePlace, PartState, PartStatus, PipelinePlace, RelayPlace

if TYPE_CHECKING:
    from penstock.spark import BooksReading

_RATE_WINDOW_MS = 60_000
_FINDINGS_MAX = 20


def overview(sources: Sources) -> dict[str, object]:
    """Return the overview from the last readings of the pollers, without a request."""
    parts = sources.fleet.parts()
    figures = dict(_figures(sources))
    stored = dict(_stored(sources))
    sinks = {name: _sinks(source.main.reading.value) for name, source in sources.pipelines.items()}
    return {
        "at_ms": sources.clock.now_ms(),
        "version": penstock.__version__,
        "parts": [part_fields(part) for part in parts],
        "flow": topology_of(sources.places, sources.collector_place, parts, figures, stored, sinks).fields(),
        "balance": [line for source in sources.pipelines.values() for line in balance_of(source)],
    }


def part_fields(part: PartStatus) -> dict[str, object]:
    return {
        "name": part.name,
        "kind": part.kind.value,
        "state": state_of(part),
        "since_ms": part.since_ms,
        "pid": part.pid,
        "restarts": part.restarts,
        "last_error": part.last_error,
        "address": url_of(part),
        "disabled_why": part.disabled_why,
    }


def balance_of(source: PipelineSource) -> list[dict[str, object]]:
    """Return the balance of each sink of a pipeline by the last audit. Its fields are null before that."""
    reading = source.balance.reading
    common: dict[str, object] = {
        "pipeline": source.place.name,
        "as_of_ms": reading.at_ms,
        "source": "durable ledgers",
        "error": reading.error,
    }
    if reading.value is None:
        names = ("produced", "delivered", "dead_lettered", "dropped", "skipped", "in_flight", "balances")
        empty: dict[str, object] = dict.fromkeys(names)
        return [{"chain": source.place.name, "sink": None, **empty, **common, "findings": []}]
    report = reading.value
    problems = problems_in(report.balance.findings)
    texts = [f"{finding.subject}: {finding.text}" for finding in problems[:_FINDINGS_MAX]]
    return [
        {
            "chain": f"{source.place.name} → {sink.name}",
            "sink": sink.name,
            "produced": sink.produced,
            "delivered": sink.delivered,
            "dead_lettered": sink.dead,
            "dropped": sink.dropped,
            "skipped": sink.skipped,
            "in_flight": sink.in_flight,
            "balances": report.balanced,
            **common,
            "findings": texts,
        }
        for sink in report.balance.sinks
    ]


def _stored(sources: Sources) -> Iterator[tuple[str, bool]]:
    for name, queue in sources.queues.items():
        yield f"queue:{name}", queue.main.reading.value is not None
    for name, quiver in sources.quivers.items():
        yield f"quiver:{name}", quiver.main.reading.value is not None
    for name, pipeline in sources.pipelines.items():
        reading = pipeline.main.reading.value
        for sink in () if reading is None else reading.sinks:
            yield f"sink:{name}/{sink.name}", sink.error is None


def _sinks(reading: BooksReading | None) -> Sequence[tuple[str, str]]:
    return () if reading is None else [(sink.name, sink.kind) for sink in reading.sinks]


def _figures(sources: Sources) -> Iterator[tuple[EdgeKey, Figures]]:
    places, collector = sources.places, sources.collector_place
    if places.topics is not None:
        yield ("clients", "topics", places.topics.part), _into_topics(sources)
    for relay in places.relays:
        yield ("topics", f"queue:{relay.queue}", relay.part), _relayed(sources, relay)
    if collector is not None:
        yield from _collected(sources)
    for pipeline in places.pipelines:
        yield from _piped(sources, pipeline)
    for database in places.databases:
        if database.queue is not None:
            key = (f"queue:{database.queue}", f"database:{database.name}", database.part)
            yield key, _fed(sources, database)


def _topics(sources: Sources) -> Reading[TopicsReading]:
    """Return the last reading of the topics server. It has no value while the part is down."""
    reading, place = sources.topics.main.reading, sources.places.topics
    part = None if place is None else sources.part(place.part)
    if part is None or part.state is PartState.READY:
        return reading
    why = part.last_error or f"{part.name} is {state_of(part)}"
    return Reading(value=None, at_ms=reading.at_ms, error=why, failing_since_ms=part.since_ms)


def _into_topics(sources: Sources) -> Figures:
    topics = sources.topics
    reading = topics.numbers.reading
    if reading.value is None:
        return Figures(is_read=False, error=reading.error)
    return Figures(rate_records_s=topics.frames.rate, rate_bytes_s=topics.bytes.rate)


def _relayed(sources: Sources, relay: RelayPlace) -> Figures:
    queue = sources.queues.get(relay.queue)
    topics = _topics(sources)
    if queue is None or queue.main.reading.value is None:
        return Figures(is_read=False, error=None if queue is None else queue.main.reading.error)
    if topics.value is None:
        return Figures(is_read=False, error=topics.error)
    position = queue.main.reading.value.positions.get(relay.app)
    state = topics.value.states.get(relay.topic)
    if state is None:
        return Figures(backlog=0, error=f"there is no topic {relay.topic} yet")
    backlog = records_behind(head=state.head_seq, earliest=state.earliest_seq, position=position)
    oldest = topics.value.oldest_ms.get(relay.topic)
    meter = queue.relays.get(relay.app)
    return Figures(
        rate_records_s=None if meter is None else meter.rate,
        backlog=backlog,
        lag_s=0.0 if not backlog else None if oldest is None else _age_s(sources, oldest),
    )


def records_behind(*, head: int, earliest: int, position: int | None) -> int:
    """Return the number of records that a relay has not read and the topic has not evicted. Pure."""
    return max(0, head - max(position or 0, earliest - 1))


def _collected(sources: Sources) -> Iterator[tuple[EdgeKey, Figures]]:
    collector = sources.collector_place
    assert collector is not None
    reading = sources.collector.main.reading
    value = reading.value
    yield ("otlp", "collector", collector.part), _kept(sources, value, None)
    for name in collector.quivers:
        quiver = sources.quivers.get(name)
        error = None if quiver is None else quiver.main.reading.error
        yield ("collector", f"quiver:{name}", collector.part), _kept(sources, value, error)
    one = collector.quivers[0] if len(collector.quivers) == 1 else None
    source = "collector" if one is None else f"quiver:{one}"
    for name in collector.queues:
        yield (source, f"queue:{name}", collector.part), _exported(sources, value, one, name)


def _kept(sources: Sources, value: Exposition | None, error: str | None) -> Figures:
    if value is None or error is not None:
        return Figures(is_read=False, error=error or sources.collector.main.reading.error)
    return Figures(rate_bytes_s=sources.collector.rate("collector_receiver_bytes"))


def _exported(sources: Sources, value: Exposition | None, quiver: str | None, queue: str) -> Figures:
    watch = sources.queues.get(queue)
    if value is None or watch is None or watch.main.reading.value is None:
        error = sources.collector.main.reading.error
        return Figures(is_read=False, error=error or (None if watch is None else watch.main.reading.error))
    held = None if quiver is None else sources.quivers[quiver].main.reading.value
    readers = [] if held is None else [look.subscriber for _, look in held.subscribers]
    pending = None if held is None else max((reader.pending_segments for reader in readers), default=0)
    oldest = [reader.oldest_pending_ns for reader in readers if reader.oldest_pending_ns is not None]
    lag = _age_s(sources, min(oldest) // 1_000_000) if oldest else 0.0 if held is not None else None
    return Figures(
        rate_records_s=watch.records.rate,
        rate_bytes_s=watch.bytes.rate,
        backlog=pending,
        backlog_unit="segments",
        lag_s=lag,
    )


def _piped(sources: Sources, place: PipelinePlace) -> Iterator[tuple[EdgeKey, Figures]]:
    source = sources.pipelines.get(place.name)
    if source is None:
        return
    reading = source.main.reading
    node = f"pipeline:{place.name}"
    books = reading.value
    queue = None if place.queue is None else sources.queues.get(place.queue)
    if queue is not None:
        yield (f"queue:{place.queue}", node, place.part), _consumed(sources, queue, reading)
    if books is None:
        return
    now = sources.clock.now_ms()
    for sink in books.sinks:
        rows = [
            (line.at_ms, line.dead if sink.is_letters else line.rows.get(sink.name, 0))
            for line in books.batches
        ]
        key = (node, f"sink:{place.name}/{sink.name}", place.part)
        yield key, Figures(rate_records_s=lines_rate(rows, now), error=sink.error)


def _consumed(sources: Sources, queue: QueueWatch, reading: Reading[BooksReading]) -> Figures:
    books, held = reading.value, queue.main.reading.value
    if books is None or held is None:
        return Figures(is_read=False, error=reading.error or queue.main.reading.error)
    reached = books.batches[-1].end if books.batches else {}
    rows = [(line.at_ms, line.read) for line in books.batches]
    return Figures(
        rate_records_s=lines_rate(rows, sources.clock.now_ms()),
        backlog=backlog_of(held, reached),
        backlog_unit="batches",
        lag_s=_lag_s(sources, queue, reached),
    )


def backlog_of(held: QueueReading, reached: Mapping[int, int]) -> int:
    """Count the batches of the queue after the read position, by shard."""
    return sum(
        max(0, shard.following - max(reached.get(shard.shard, 0), shard.first)) for shard in held.shards
    )


def _lag_s(sources: Sources, queue: QueueWatch, reached: Mapping[int, int]) -> float | None:
    oldest = queue.source.oldest_from(reached)
    return 0.0 if oldest is None else _age_s(sources, oldest)


def _fed(sources: Sources, place: DatabasePlace) -> Figures:
    reading = sources.databases[place.name].main.reading
    queue = sources.queues.get(place.queue or "")
    held = None if queue is None else queue.main.reading.value
    if reading.value is None:
        return Figures(is_read=False, error=reading.error)
    if queue is None or held is None:
        return Figures(is_read=False, error=None if queue is None else queue.main.reading.error)
    through = feed_position(reading.value)
    reached = {} if through is None else {0: through + 1}
    return Figures(
        rate_records_s=sources.databases[place.name].rate("feed_records"),
        backlog=backlog_of(held, reached),
        backlog_unit="batches",
        lag_s=_lag_s(sources, queue, reached),
    )


def feed_position(metrics: Exposition) -> int | None:
    """Return the last sequence of its queue that is durable in a database."""
    value = metrics.total("feed_sequence")
    return None if value is None or value < 0 else int(value)


def lines_rate(lines: Sequence[tuple[int, int]], now_ms: int) -> float | None:
    """Return records per second over the last minute, from (time, count) of micro-batches, or None.

    If the lines do not reach back that far, use the time that they cover.
    """
    if not lines:
        return None
    first_ms = lines[0][0]
    if len(lines) >= LINES_SHOWN and now_ms - _RATE_WINDOW_MS < first_ms < now_ms:
        return sum(count for _, count in lines[1:]) * 1000 / (now_ms - first_ms)
    recent = [count for at_ms, count in lines if at_ms > now_ms - _RATE_WINDOW_MS]
    return sum(recent) * 1000 / _RATE_WINDOW_MS


def _age_s(sources: Sources, at_ms: int) -> float:
    return max(0.0, (sources.clock.now_ms() - at_ms) / 1000)
