"""Probes and metrics: health, readiness, and metrics as Prometheus text or JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from penstock.http import Response
from penstock.metrics import Registry
from penstock.topics import SYNC_BUCKETS_US, Durability, Engine, EngineStats, WalStats

TOPIC_SERIES_MAX: Final = 1000
"""Topics with their own series. A scrape must not grow with the number of topics."""

_ENCODE: Final = msgspec.json.Encoder().encode
_TEXT: Final = b"text/plain; version=0.0.4"
_NO_STORE: Final = ((b"cache-control", b"no-store"),)


def health_answer(version: str, uptime_ms: int) -> Response:
    return Response(200, _ENCODE({"status": "ok", "version": version, "uptime_ms": uptime_ms}))


def ready_answer(topics: int) -> Response:
    body = {"status": "ready", "wal_replay_complete": True, "topics": topics}
    return Response(200, _ENCODE(body))


def metrics_answer(
    engine: Engine,
    uptime_ms: int,
    *,
    as_json: bool,
    allowed: Callable[[str], bool] | None = None,
    connections: int = 0,
    sessions: int = 0,
    waiting: int = 0,
) -> Response:
    """Return all metrics. Before the engine is ready, return only the progress of recovery.

    Only topics whose names are `allowed` have series; totals count all topics.
    """
    numbers = engine.stats() if engine.ready else None
    ladder = engine.scheduler.ladder
    if as_json:
        values = _values(engine, numbers, uptime_ms)
        values |= {"sse_connections": connections, "watch_sessions": sessions}
        values |= {"pressure": round(ladder.pressure, 4), "delivery_waiting": waiting}
        values["delivery_deferred"] = ladder.defers
        return Response(200, _ENCODE(values), headers=_NO_STORE)
    registry = Registry()
    registry.gauge("topics_sse_connections", "Open streams and WebSockets.").set(connections)
    registry.gauge("topics_watch_sessions", "Watch sessions.").set(sessions)
    registry.gauge("topics_pressure", "How overloaded the server is, from 0 to 1.").set(ladder.pressure)
    registry.gauge("topics_delivery_waiting", "Topics with something to deliver.").set(waiting)
    deferred = registry.gauge("topics_delivery_deferred", "1 when negative priorities are not pushed.")
    deferred.set(int(ladder.defers))
    text = _text(registry, engine, numbers, uptime_ms, allowed).encode()
    return Response(200, text, content_type=_TEXT, headers=_NO_STORE)


def _values(engine: Engine, numbers: EngineStats | None, uptime_ms: int) -> dict[str, object]:
    by_class = {} if numbers is None else numbers.by_class
    return {
        "topics": 0 if numbers is None else numbers.topics,
        **{f"topics_{durability.value}": by_class.get(durability, 0) for durability in Durability},
        "routers": engine.router_count,
        "records_live": 0 if numbers is None else numbers.records_live,
        "bytes_live": 0 if numbers is None else numbers.bytes_live,
        "queue_topics": 0 if numbers is None else numbers.queue_topics,
        "queue_leases_in_flight": 0 if numbers is None else numbers.queue_leases_in_flight,
        "ready": engine.ready,
        "replay_progress": engine.replay_progress,
        "uptime_ms": uptime_ms,
        "wal": _wal_values(None if numbers is None else numbers.wal),
    }


def _wal_values(wal: WalStats | None) -> dict[str, object]:
    if wal is None:
        names = ("fsyncs", "frames", "batches", "bytes_written", "rotations", "queue_depth")
        more = ("queue_depth_peak", "submit_full_total", "fsync_count", "fsync_micros_total")
        return {**dict.fromkeys((*names, *more), 0), "read_only": False}
    return {
        "fsyncs": wal.fsyncs,
        "frames": wal.frames,
        "batches": wal.batches,
        "bytes_written": wal.bytes_written,
        "rotations": wal.rotations,
        "queue_depth": wal.queue_depth,
        "queue_depth_peak": wal.queue_depth_peak,
        "submit_full_total": wal.submit_full,
        "read_only": wal.read_only,
        "fsync_count": sum(wal.fsync_counts),
        "fsync_micros_total": int(wal.fsync_micros_total),
    }


def _text(
    registry: Registry,
    engine: Engine,
    numbers: EngineStats | None,
    uptime_ms: int,
    allowed: Callable[[str], bool] | None,
) -> str:
    registry.gauge("topics_ready", "1 when requests are served.").set(int(engine.ready))
    registry.gauge("topics_recovery_progress", "How much of the log is replayed, 0 to 1.").set(
        engine.replay_progress
    )
    registry.counter("topics_uptime_ms", "Milliseconds since the start.").inc(uptime_ms)
    registry.gauge("topics_routers", "Routers.").set(engine.router_count)
    leased = registry.gauge("topics_queue_leases_in_flight", "Jobs that are leased.")
    leased.set(0 if numbers is None else numbers.queue_leases_in_flight)
    if numbers is None:
        return registry.prometheus_text()
    _add_totals(registry, numbers)
    _add_topics(registry, engine, allowed)
    _add_wal(registry, numbers.wal)
    return registry.prometheus_text() + _fsync_histogram(numbers.wal)


def _add_totals(registry: Registry, numbers: EngineStats) -> None:
    by_class = registry.gauge("topics_topics_by_class", "Topics by durability.", ["class"])
    for durability in Durability:
        by_class.set(numbers.by_class.get(durability, 0), **{"class": durability.value})
    registry.gauge("topics_topics", "Topics.").set(numbers.topics)
    registry.gauge("topics_queue_topics", "Topics that are queues.").set(numbers.queue_topics)
    registry.gauge("topics_records_live", "Records that can be read.").set(numbers.records_live)
    registry.gauge("topics_bytes_live", "Accounted bytes of the live records.").set(numbers.bytes_live)


def _add_topics(registry: Registry, engine: Engine, allowed: Callable[[str], bool] | None) -> None:
    states, after = engine.topics(limit=TOPIC_SERIES_MAX, allowed=allowed)
    head = registry.gauge("topics_topic_head_seq", "The newest sequence.", ["topic"])
    earliest = registry.gauge("topics_topic_earliest_seq", "The first live sequence.", ["topic"])
    records = registry.gauge("topics_topic_records_live", "Records that can be read.", ["topic"])
    size = registry.gauge("topics_topic_bytes_live", "Accounted bytes of the live records.", ["topic"])
    ready = registry.gauge("topics_topic_queue_ready", "Jobs that can be claimed.", ["topic"])
    leased = registry.gauge("topics_topic_queue_in_flight", "Jobs that are leased.", ["topic"])
    for state in states:
        head.set(state.head_seq, topic=state.topic)
        earliest.set(state.earliest_seq, topic=state.topic)
        records.set(state.count, topic=state.topic)
        size.set(state.bytes, topic=state.topic)
        if state.queue is not None:
            ready.set(state.queue.ready, topic=state.topic)
            leased.set(state.queue.in_flight, topic=state.topic)
    truncated = registry.gauge("topics_topic_metrics_truncated", "1 when some topics have no series.")
    truncated.set(int(after is not None))


def _add_wal(registry: Registry, wal: WalStats) -> None:
    registry.gauge("topics_wal_queue_depth", "Writes that wait for a commit.").set(wal.queue_depth)
    registry.gauge("topics_wal_queue_depth_peak", "The highest queue depth.").set(wal.queue_depth_peak)
    registry.gauge("topics_wal_read_only", "1 when the log cannot be written.").set(int(wal.read_only))
    for name, help_text, value in (
        ("frames", "Frames in the log.", wal.frames),
        ("batches", "Group commits.", wal.batches),
        ("fsyncs", "Syncs of the log.", wal.fsyncs),
        ("bytes_written", "Bytes in the log.", wal.bytes_written),
        ("rotations", "Log files started.", wal.rotations),
        ("submit_full", "Writes refused because too many were waiting.", wal.submit_full),
    ):
        registry.counter(f"topics_wal_{name}_total", help_text).inc(value)


def _fsync_histogram(wal: WalStats) -> str:
    """Format the histogram from counts that the commit threads keep, so that a scrape costs them nothing."""
    name = "topics_wal_fsync_latency_us"
    lines = [f"# HELP {name} Duration of a log sync.", f"# TYPE {name} histogram"]
    seen = 0
    for bound, count in zip((*SYNC_BUCKETS_US, "+Inf"), wal.fsync_counts, strict=True):
        seen += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {seen}')
    lines += [f"{name}_sum {int(wal.fsync_micros_total)}", f"{name}_count {seen}", ""]
    return "\n".join(lines)
